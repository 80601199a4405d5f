# Every target sets up what it needs: `make demo` or `make test` on a fresh machine is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint browser s3 docs mutation campaign slurm lock clean

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
	$(BIN)/lint-imports --no-cache > .lint-imports.log || { cat .lint-imports.log; exit 1; }

test: lint browser s3
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 10

browser: ## Chromium for the tests of the viewer, where it can be had; they are skipped where it cannot
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	       && { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >/dev/null 2>&1; } \
	  || echo "no chromium here and none could be installed: the browser tests of the viewer are skipped"

s3: $(READY) ## moto, an S3 server for the tests of files far away, in a folder of its own; they are skipped where it cannot be had
	@test -d .moto || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .moto -r tests/s3-server.lock \
	  || echo "no moto here: the tests of files far away are skipped"

docs: $(READY)
	$(BIN)/mkdocs build --strict

mutation: $(READY) ## which small changes of the method's source no test notices; SHARE=1 tries all, which takes hours
	$(BIN)/python -m pip install --quiet --disable-pip-version-check mutmut==3.8.0
	$(BIN)/python tests/mutation.py --share $(or $(SHARE),0.1)

campaign: $(READY) ## attack every command for MINUTES: kills, damaged inputs, full disks, stale caches, failing processes, the viewer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0 || echo "no Atheris here: inputs are not guided"
	$(BIN)/python -m tests.campaign --minutes $(or $(MINUTES),60)

slurm: $(READY) ## start a small Slurm on this machine and submit the files of docs/guide/slurm.md; as root on Debian it is installed
	@command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || { apt-get update -qq; apt-get install -y -qq slurm-wlm munge; }
	ITS2CLR_SLURM=1 $(BIN)/python -m pytest -v -s tests/slurm

lock: ## exact versions of a fresh install of the ranges in pyproject.toml
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet '.[dev,docs]'
	.venv-lock/bin/python -m pip freeze --exclude its2clr --exclude-editable \
	  | sed -E '/^(nvidia|cuda|triton)/s/$$/ ; sys_platform == "linux"/' > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .moto runs site
