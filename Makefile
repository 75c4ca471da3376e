# Two commands do everything: `make demo` and `make test`. Both build the environment that they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check clean

demo: $(VENV)/.demo
	$(BIN)/baffle run

test: $(VENV)/.dev
	scripts/check
	scripts/test

check: $(VENV)/.dev
	scripts/check

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "BAFFLE needs Python 3.11 or newer; set PYTHON=... to one"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: what it installs depends on these two files and on nothing else.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@
