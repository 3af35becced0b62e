# make venv | test | test-full | upstream-tests | mutations | demo | gpu-checks | lint | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Compiled modules are kept, whatever the environment says: tests start hundreds of processes that import the same ones.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv test test-full upstream-tests mutations demo gpu-checks lint clean

venv: $(STAMP)

# torch comes first and alone: a package that wants torch must find it installed rather than choose one itself.
# The stamp goes before anything else, so that a failed install is tried again, and comes back at the very end.
$(STAMP): setup.py constraints.txt pyproject.toml
	@rm -f $@
	@$(PIP) --version >/dev/null 2>&1 || { $(PYTHON) -c '$(CHECK)' && $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV); the first time this takes some minutes ..."
	@$(PIP) install --quiet -c constraints.txt "$(TORCH)"
	@$(PIP) install --quiet -c constraints.txt -e ".[megatron,plot,test]"
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

# Two files at a time, but for those that look at the clock.
PYTEST := $(BIN)/pytest

test: lint
	$(PYTEST) -n 2 --dist loadfile -m "not alone"
	$(PYTEST) -m alone

test-full: lint
	TERAPIPE_TEST_FULL=1 $(PYTEST) -n 2 --dist loadfile -m "not alone"
	TERAPIPE_TEST_FULL=1 $(PYTEST) -m alone

# Other projects' own tests and programs with our engine: folders with checkouts, which stay as they are. Each part runs
# where its source is given.
upstream-tests: venv
	@test -n "$(DEEPSPEED_SOURCE)$(MEGATRON_DEEPSPEED_SOURCE)" || \
		{ echo "make upstream-tests DEEPSPEED_SOURCE=FOLDER MEGATRON_DEEPSPEED_SOURCE=FOLDER (one of them or both)"; exit 2; }
	$(if $(DEEPSPEED_SOURCE),$(BIN)/python -m tests.upstream.deepspeed_tests "$(DEEPSPEED_SOURCE)")
	$(if $(MEGATRON_DEEPSPEED_SOURCE),$(BIN)/python -m tests.upstream.megatron_deepspeed "$(MEGATRON_DEEPSPEED_SOURCE)")

mutations: venv
	$(BIN)/python -m tests.mutation_check

demo: venv
	$(BIN)/python examples/demo.py

# For whoever has a device (docs/gpu.md): PART=attention or several of them, by default all; DRY_RUN=1 needs none.
OUT ?= out/gpu-checks

gpu-checks: venv
	$(BIN)/python -m tests.gpu_checks --out $(OUT) $(if $(DRY_RUN),--dry-run) $(PART)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
