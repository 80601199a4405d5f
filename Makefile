# Every target sets up what it needs: `make demo` or `make test` on a fresh machine is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint types docs lock clean

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

demo: $(READY)
	$(BIN)/its2clr demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 10

docs: $(READY)
	$(BIN)/mkdocs build --strict

lock: ## exact versions of a fresh install of the ranges in pyproject.toml
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet '.[dev,docs]'
	.venv-lock/bin/python -m pip freeze --exclude its2clr --exclude-editable \
	  | sed -E '/^(nvidia|cuda|triton)/s/$$/ ; sys_platform == "linux"/' > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) runs site
