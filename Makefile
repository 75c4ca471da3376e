# `make demo` trains, `make test` checks and tests in a few minutes, `make test-all` leaves nothing out, `make soak` tries
# properties on random examples until you stop it. Each builds the environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all soak check clean

demo: $(VENV)/.demo
	$(BIN)/baffle run

test: $(VENV)/.dev
	scripts/check
	scripts/test

test-all: $(VENV)/.dev
	scripts/check
	scripts/test --all
	$(BIN)/coverage report --fail-under=96 --format=total

soak: $(VENV)/.dev
	scripts/soak

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
