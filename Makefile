# One entry point for people and for CI. Needs Python 3.11 or newer with pip, and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make test WORKERS=1` runs the tests one after another.
WORKERS ?= 2
# Each worker gets a contiguous half, and takes from the other's when it has finished. So fixtures of a file or a folder,
# such as trained runs, and imports of other libraries are mostly needed once.
IN_PARALLEL := -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo check format test test-slow test-gpu docs docs-serve drawings golden bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# The stamps are remade when the list of dependencies changes, so that a second run installs nothing.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Vitrail needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
	    echo "Name another one: make demo PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version >/dev/null || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' made no environment with pip (on Debian: apt install python3-venv)."; exit 2; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.installed-all: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,dev,docs]'
	@touch $@

demo: $(VENV)/.installed ## train a ViT from scratch on the built-in digits, measure it, and write a report about it
	@$(BIN)/vitrail train

check: $(VENV)/.installed-all ## formatting, lint, types, and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

format: $(VENV)/.installed-all ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(VENV)/.installed-all ## the tests
	@scripts/install-chromium || test -z "$$CI"
	$(BIN)/pytest -q $(IN_PARALLEL) -m "not slow and not gpu"

test-slow: $(VENV)/.installed-all ## what is too slow for `make test`: full-size models, compilation
	$(BIN)/pytest -q $(IN_PARALLEL) -m "slow and not gpu"

test-gpu: $(VENV)/.installed-all ## the tests that need a CUDA device
	$(BIN)/pytest -q -m gpu

docs: $(VENV)/.installed-all ## build the documentation into site/, any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.installed-all ## read the documentation while writing it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

drawings: $(VENV)/.installed ## draw the images of the documentation again
	$(BIN)/python docs/drawings/draw.py

golden: $(VENV)/.installed-all ## write the golden files anew; look at the diff before committing it
	$(BIN)/python tests/golden/regenerate.py
	$(BIN)/python tests/golden/curves.py > tests/golden/curves.tmp && mv tests/golden/curves.tmp tests/golden/curves.json

bench: $(VENV)/.installed-all ## compare the model's speed with timm's on this machine
	$(BIN)/python benchmarks/model.py

clean: ## remove what can be made again
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
