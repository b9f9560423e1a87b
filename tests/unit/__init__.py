"""Each test_x.py here is of one file x.py of the package, without a model around it."""
