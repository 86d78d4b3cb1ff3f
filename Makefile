# `make demo` runs the main job, `make test` all tests but the exhaustive ones. Both build their own virtual environment first.
#
#   PYTHON=python3.12        the interpreter that the environment is made from (3.11 or newer)
#   VENV=.venv               where the environment lives
#   TORCH=torch==2.13.0      which PyTorch to install, instead of the choice made below
#   WORKERS=2                test processes
#   DEMO='--json demo.json'  further arguments of `mha2mla demo`
#   PYTEST='-m gpu'          further arguments of pytest

SHELL   := /bin/bash
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
DEMO    ?=
PYTEST  ?=
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed

.PHONY: help demo test docs lint format notebook notebook-outputs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8; echo; grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/:/'

# Keyed on pyproject.toml: a changed dependency brings the environment up to date on the next call.
# The CPU build of PyTorch is offered under a local version; where it is not, the plain release does the same work.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mha2mla needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@set -e; pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check"; \
	if [ -n "$(TORCH)" ]; then echo "installing $(TORCH)"; $$pip "$(TORCH)"; \
	elif nvidia-smi -L >/dev/null 2>&1; then echo "installing PyTorch for the GPU"; $$pip "torch==2.13.0"; \
	else echo "installing PyTorch for the CPU"; \
	  $$pip "torch==2.13.0+cpu" 2>/dev/null || $$pip "torch==2.13.0"; fi; \
	echo "installing mha2mla and what it needs"; $$pip -e ".[dev,docs,notebooks]"
	@touch $@

demo: $(STAMP)  ## convert a first model, compare it, show what it gives
	$(BIN)/mha2mla demo $(DEMO)

# Tests start some hundred processes, each of which would compile the sources anew.
test: $(STAMP)  ## all tests but the exhaustive ones
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

docs: $(STAMP)  ## the site, in build/site
	.ci/docs $(BIN)/python

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## ruff format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The .py is the source; the .ipynb is generated from it and keeps the outputs of the cells that did not change.
notebook: $(STAMP)  ## notebooks from their sources
	$(BIN)/jupytext --update --to ipynb notebooks/*.py

# What the notebooks are committed with; on a GPU with the times of that GPU.
notebook-outputs: notebook  ## notebooks with their outputs
	for each in notebooks/*.ipynb; do \
	  MHA2MLA_NOTEBOOK_MODEL=$${MHA2MLA_NOTEBOOK_MODEL:-smollm2} $(BIN)/jupyter-execute --inplace --timeout=3600 $$each || exit 1; done

clean:  ## remove what the others made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
