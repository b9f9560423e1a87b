# `make demo` and `make test` are all a fresh machine needs: both make .venv first.

PYTHON ?= python3
TORCH := $(shell grep '^torch==' constraints.txt)
BIN := .venv/bin
PYTEST_FLAGS ?= -n 2 --dist worksteal

.PHONY: demo test long lint docs browser clean

demo: .venv/installed
	$(BIN)/python examples/demo

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# What `make test` leaves out: every row of tests/ledger/, long sequences of private steps, all models of the zoo, and
# the second backend, dtype or option of what is tested with the first.
long: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m long

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

# The site, in docs/_build/html: nothing is fetched, each example runs, a warning or a link that leads nowhere is an error.
docs: .venv/docs
	rm -rf docs/_build docs/gallery
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -E -W --keep-going -q docs docs/_build/html
	$(BIN)/python tools/check_site.py

# Looks at the site that `make docs` has built, and at a page of `explain`, in a headless Chromium (apt-get install chromium).
browser: .venv/browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m browser tests/browser

# torch comes first and as exactly one version, so that a CPU build is taken where there is one.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,frameworks,zoo]"
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

.venv/browser: .venv/docs
	$(BIN)/python -m pip install -c constraints.txt -e ".[browser]"
	touch $@

clean:
	rm -rf .venv docs/_build docs/gallery build dist fxgrad.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
