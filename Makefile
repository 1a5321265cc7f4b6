# `make demo` and `make test` are all a newcomer needs; both make the environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
OLDEST := $(VENV)/oldest-transformers
NEWEST := $(VENV)-newest
DEEPSPEED := $(VENV)/deepspeed
# What runs DeepSpeed; where it is not installed these tests are skipped.
ON_DEEPSPEED := tests/engine/test_zero.py tests/training/test_deepspeed.py
# What runs with the newest of everything: all that touches megatron-core.
ON_NEWEST := tests/layouts tests/engine tests/backbone tests/checkpoint tests/training tests/test_old_files.py tests/docs/test_megatron.py
DEMO ?= demo-run
# What runs with the newest and with the oldest transformers.
BOTH := tests/export/test_transformers.py tests/export/test_round_trip.py tests/export/test_defaults.py
# One more than two cores: some tests wait for time-outs.
JOBS ?= 3
SCRIPTS := .ci/run docker/install.sh $(wildcard launch/*.sh launch/*.sbatch)

# Small models and tests gain nothing from a second thread: waiting for it costs more than it does.
export OMP_NUM_THREADS ?= 1
# A training step frees and asks for the same memory again: keep it (and in huge pages, where the system has them)
# instead of giving it back.  Halves the step of a small model where page faults are dear, as in virtual machines.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=2147483647:glibc.malloc.top_pad=67108864

# Packages are installed uncompiled: where Python may not keep what it compiles, each of hundreds of processes compiles
# PyTorch and megatron-core anew, for 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-newest test-deepspeed suite beside oldest lint format docs env clean help

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-11s %s\n", $$1, $$2}'

demo: env ## Train, resume, export and sample a small pondering model on the CPU; result in demo-run/
	$(BIN)/megaponder demo --out $(DEMO)

test: env ## Lint and all tests, in three processes (make test JOBS=8 takes more)
	@$(MAKE) --no-print-directory --jobs=2 suite beside

suite: env
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# What is quick, and shown once it has ended.
beside: lint $(OLDEST)
	@$(MAKE) --no-print-directory oldest >$(VENV)/oldest.log 2>&1; code=$$?; tail -n 40 $(VENV)/oldest.log; exit $$code

oldest: $(OLDEST) ## The exports' tests with the oldest transformers
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest --quiet --numprocesses 1 $(BOTH)

# Without constraints.txt: whatever the registry has today.
test-newest: ## What touches megatron-core, with the newest packages (make test-newest PYTHON=python3.12)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "The newest megatron-core needs Python 3.12: run make test-newest PYTHON=python3.12." >&2; exit 1; }
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager \
	  --editable '.[export,parquet]' pytest pytest-xdist hypothesis
	$(NEWEST)/bin/python -m pip list | grep -E '^(torch|megatron-core|numpy|transformers) '
	$(NEWEST)/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ON_NEWEST) $(PYTEST_ARGS)

test-deepspeed: $(DEEPSPEED) ## The second engine's tests, with DeepSpeed beside the environment
	PYTHONPATH=$(DEEPSPEED) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ON_DEEPSPEED) $(PYTEST_ARGS)

lint: env ## ruff, mypy, codespell, shellcheck, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/hadolint docker/*.Dockerfile

format: env ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env ## Build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

env: $(STAMP) ## Make .venv with the tested versions (Python 3.10+; make env PYTHON=python3.12 picks another)

# The stamp is written last, so an interrupted installation is taken up again.  Python compiles what it imports; pip would
# compile everything.
$(STAMP): pyproject.toml setup.py constraints.txt docker/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "megaponder needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo 'not installed'):" \
	    "run make env PYTHON=python3.11, or name any newer one you have." >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV) (once, some minutes) ..."
	docker/install.sh $(abspath $(BIN))/python dev --no-compile
	@touch $@

# The oldest transformers that exports run with; all other packages are those of the environment.
$(OLDEST): | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $@.partial \
	  transformers==4.51.3 'tokenizers>=0.21,<0.22' 'huggingface-hub>=0.30,<1'
	mv $@.partial $@

# The version that docs/deepspeed.md names; it is pure Python, and compiles nothing that is used here.
$(DEEPSPEED): | $(STAMP)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-compile --target $@.partial \
	  deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo
	mv $@.partial $@

clean: ## Remove the environment, caches and the demo's folder
	rm -rf $(VENV) $(NEWEST) $(DEMO) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
