# Each target is enough on a fresh machine with Python 3.11 or newer: it makes .venv, installs pinned versions, runs.
PYTHON ?= python3
VENV := .venv
ENGINES := .venv-engines
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-engines notebooks lint clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	rm -rf quads-qat-demo
	$(BIN)/quads-qat demo --out quads-qat-demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -q

# vLLM's own layers and loaders as clients of our checkpoints, on a CPU, in an environment of their own (2.5 GB).
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest -n 2 -q tests/engines_real

# Needs TRL, which `make test` goes without: the notebooks run, without being changed, and so do TRL's tests.
notebooks: $(VENV)/.notebooks
	$(BIN)/python -m pytest -n 2 -q tests/test_integrations_trl.py tests/test_notebooks.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(ENGINES)

# torch goes first and alone: pip then takes the build that its configuration prefers (a CPU build, say),
# and the second command keeps it. The stamp is written last, so an interrupted install starts again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("the pinned versions need Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.notebooks: $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[trl]' ipykernel nbclient nbformat
	@touch $@

# Everything is pinned and installed without dependencies: vLLM's would be 10 GB of what only GPUs need.
$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install torch==2.13.0
	$(ENGINES)/bin/python -m pip install --no-deps -r constraints-engines.txt
	$(ENGINES)/bin/python -m pip install --no-deps -e .
	@touch $@
