# make venv | test | test-full | test-versions | test-transformers | upstream-tests | mutations | demo | gpu-checks | lint | clean
#      dist | wheel-check | docs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
STAMP := $(VENV)/.installed-torch-$(TORCH)
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Compiled modules are kept, whatever the environment says: tests start hundreds of processes that import the same ones.
export PYTHONDONTWRITEBYTECODE :=

# The ends of what is tested, with environments of their own: make test-versions PYTHON_NEWEST=/path/to/python3.13
PYTHON_OLDEST ?= python3.11
PYTHON_NEWEST ?= python3.13
TORCH_OLDEST ?= 2.11.0
TORCH_NEWEST ?= 2.15.0

# What other packages are pinned to, and how pip is to look for newer ones.
PINNED := constraints.txt
UPGRADE :=

.PHONY: venv test test-full test-versions test-oldest test-newest test-transformers suite upstream-tests mutations demo gpu-checks lint clean \
	dist wheel-check docs docs-venv

venv: $(STAMP)

# torch comes first and alone: a package that wants torch must find it installed rather than choose one itself.
# The stamp goes before anything else, so that a failed install is tried again, and comes back at the very end.
$(STAMP): setup.py $(PINNED) pyproject.toml
	@rm -f $(VENV)/.installed*
	@$(PIP) --version >/dev/null 2>&1 || { $(PYTHON) -c '$(CHECK)' && $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV); the first time this takes some minutes ..."
	@{ grep -v '^torch==' $(PINNED); echo "torch==$(TORCH)"; } > $(VENV)/constraints.txt
	@$(PIP) install --quiet -c $(VENV)/constraints.txt "torch==$(TORCH)"
	@$(PIP) install --quiet $(UPGRADE) -c $(VENV)/constraints.txt -e ".[megatron,plot,test]"
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Two files at a time, but for those that look at the clock.
PYTEST := $(BIN)/pytest

test: lint suite

suite: venv
	$(PYTEST) -n 2 --dist loadfile -m "not alone"
	$(PYTEST) -n 2 --dist loadfile -m alone

# Both, whatever comes of the first; each ends with the tests that were skipped, and why. ruff and mypy are left to the
# pinned versions.
test-versions:
	@$(MAKE) --keep-going test-oldest test-newest

test-oldest:
	@$(call suite_with,.venv-oldest,$(PYTHON_OLDEST),$(TORCH_OLDEST),PYTHON_OLDEST)

# The newest of all packages that setup.py admits, whatever constraints.txt has; of torch, TORCH_NEWEST.
test-newest:
	@rm -f .venv-newest/.installed*
	@$(call suite_with,.venv-newest,$(PYTHON_NEWEST),$(TORCH_NEWEST),PYTHON_NEWEST,$(NEWEST))

NEWEST := PINNED=/dev/null UPGRADE='--upgrade --upgrade-strategy eager'

# environment, interpreter, version of torch, the variable that names the interpreter, other variables of make
define suite_with
$(2) -c 'import sys' 2>/dev/null || { echo "no interpreter $(2) here: make test-versions $(4)=/path/to/python" >&2; exit 1; }; \
now=$$($(2) -V); was=$$($(1)/bin/python -V 2>/dev/null || echo "$$now"); \
test "$$was" = "$$now" || { echo "$(1) has $$was, $(4) is $$now: remove $(1), or name the other" >&2; exit 1; }; \
echo "$$now, torch $(3)"; \
$(MAKE) suite VENV=$(1) PYTHON=$(2) TORCH=$(3) $(5) PYTEST='$(1)/bin/pytest -rs'
endef

# The oldest transformers that is claimed to work, with what it admits of its own packages: all that imports it.
TRANSFORMERS_OLDEST ?= 4.57.6
OLDER := .venv-transformers

$(OLDER)/pinned.txt: constraints.txt Makefile
	@mkdir -p $(OLDER)
	@{ grep -vE '^(transformers|tokenizers|huggingface_hub|datasets|fsspec)==' constraints.txt; \
		echo "transformers==$(TRANSFORMERS_OLDEST)"; } > $@

test-transformers: $(OLDER)/pinned.txt
	@$(MAKE) venv VENV=$(OLDER) PINNED=$(OLDER)/pinned.txt
	$(OLDER)/bin/pytest -rs -n 2 --dist loadfile tests/unit/models/hugging_face tests/unit/test_hf_examples.py \
		tests/unit/test_trainer_arguments.py tests/distributed/test_hugging_face*.py tests/distributed/test_trainer*.py

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
OUT ?= out/gpu-checks$(if $(DRY_RUN),-dry-run)

gpu-checks: venv
	$(BIN)/python -m tests.gpu_checks --out $(OUT) $(if $(DRY_RUN),--dry-run) $(PART)

# What builds the distributions and the site has an environment of its own, without torch: no test needs it.
DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

docs-venv: $(DOCS_STAMP)

$(DOCS_STAMP): docs/requirements.txt
	@$(DOCS_VENV)/bin/python -V >/dev/null 2>&1 || { $(PYTHON) -c '$(CHECK)' && $(PYTHON) -m venv $(DOCS_VENV); }
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r docs/requirements.txt
	@touch $@

# The site, into site/: open site/index.html. A warning is an error.
docs: docs-venv
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --clean

# An sdist, and a wheel that is built from it.
dist: docs-venv
	rm -rf build dist
	$(DOCS_VENV)/bin/python -m build --outdir dist .
	$(DOCS_VENV)/bin/twine check --strict dist/*

# The wheel in an empty environment, used from a folder outside of the repository.
wheel-check: venv dist
	$(BIN)/python -m tests.wheel_check dist/*.whl

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*/*" -prune -exec rm -rf {} +
