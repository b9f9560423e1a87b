import tests.import_torchvision  # noqa: F401  before the libraries that import it
