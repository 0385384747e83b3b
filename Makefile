# Start with `make demo` and `make test`. Both set up .venv automatically.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo-installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# uv installs faster if available; only pip finds torch's build for this machine.
FAST    := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python --constraint constraints.txt,$(INSTALL))
SOURCES := fedcg edge_client coordinator export devices audit experiments tests

.PHONY: help setup setup-broker demo test test-all check check-deploy docs reference format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

setup: $(STAMP)  ## create .venv and install pinned dependencies, including those of the tests

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 setup"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing. On Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (a few minutes the first time) ..."
	@$(INSTALL) torch
	@$(FAST) --editable '.[demo]' || $(INSTALL) --editable '.[demo]'
	@touch $(DEMO)

$(STAMP): $(DEMO)
	@echo "Installing the additional packages for tests (Ray, a browser driver, tools) ..."
	@$(FAST) --editable '.[dev]' || $(INSTALL) --editable '.[dev]'
	@$(INSTALL) --no-deps aeon  # only for its files: its dependencies include an older numpy
	@touch $(STAMP)

setup-broker:  ## install Mosquitto: with apt as root, else extracted into .broker
	@deploy/mosquitto/install.sh

demo: $(DEMO) setup-broker  ## run a whole federation on this machine and print its results
	@$(BIN)/fedcg demo $(DEMO_ARGS)

test: setup  ## run the fast tests, under 8 minutes on 2 cores
	@$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-all: setup  ## run all tests, including slow ones, under 40 minutes
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

check: setup  ## check format, lint, types and import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy --python-version 3.10 fedcg edge_client export devices
	@PATH="$(BIN):$$PATH" $(BIN)/lint-imports

check-deploy: setup  ## lint the units, the compose file, the Dockerfiles and the YAML
	@$(BIN)/python -m pytest -q tests/unit -k deploy

docs: setup  ## build the documentation site in build/site, with strict checks
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open build/site/index.html"

reference: setup  ## regenerate docs/reference from the code
	@$(BIN)/python -m docs.build_reference

format: setup  ## reformat the sources
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove everything that the targets created
	rm -rf $(VENV) .broker .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
