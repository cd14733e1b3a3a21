# Everything a person or CI does here. `make` alone lists the targets.

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell command -v $(p) 2>/dev/null)))
VENV   ?= .venv
BIN    := $(VENV)/bin

# The one place that chooses a build of torch. A machine on which nvidia-smi finds a GPU takes the build of the
# package index, any other takes the CPU build, and the environment is refused if it came out otherwise.
TORCH     := 2.13.0
HAS_GPU   := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
LOCK      := $(if $(HAS_GPU),requirements-gpu.lock,requirements.lock)
STAMP     := $(VENV)/.made-from-$(LOCK)
INSTALLED := $(VENV)/.installed
# Only asked where pip itself finds no CPU build.
CPU_INDEX := https://download.pytorch.org/whl/cpu

# Newer than what Python brings: it needs half the time for this many packages.
PIP_VERSION := 26.3
PIP     := $(BIN)/python -m pip --disable-pip-version-check
# The lock is complete, so there is nothing to resolve; `pip check` proves it.
INSTALL := $(PIP) install --quiet --quiet --no-deps --no-compile

.DEFAULT_GOAL := help
.PHONY: help env serve test check lock gpu-check stress fuzz clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' Makefile | expand -t 20

env: $(INSTALLED) ## make or renew the environment in .venv from the lock file

$(STAMP): $(LOCK) pyproject.toml
	@test -n "$(PYTHON)" || { echo "python3.11 or python3.12 is needed" >&2; exit 1; }
	@echo "making $(VENV) from $(LOCK)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --quiet pip==$(PIP_VERSION)
	@$(INSTALL) -c $(LOCK) torch $(if $(HAS_GPU),,2>/dev/null || $(INSTALL) -c $(LOCK) --extra-index-url $(CPU_INDEX) torch)
	@$(INSTALL) -r $(LOCK)
	@$(BIN)/python -c 'import sys, torch; cuda = torch.version.cuda; \
	  sys.exit(0 if bool(cuda) == bool("$(HAS_GPU)") else f"wrong build of torch: cuda is {cuda}")'
	@touch $@

# The project itself, and its compiled code if there is a compiler.
$(INSTALLED): $(STAMP) shared/kv/copy_rows.c
	@$(INSTALL) --no-build-isolation -e .
	@$(PIP) check
	@touch $@

serve: $(INSTALLED) ## get a model, start router, prefill and decode worker, print a curl line; Ctrl-C stops all
	@exec $(BIN)/handoff up $(ARGS)

test: $(INSTALLED) ## all tests, the ones on the real model included
	@$(BIN)/python -m pytest $(ARGS)

check: $(INSTALLED) ## style, types, the dependency rule, the compose file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/unit/test_compose.py

gpu-check: $(INSTALLED) ## the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

# pip resolves without installing and says what it would install: that list, with exact versions, is the lock.
define resolve
	$(VENV).lock/bin/python -m pip install --dry-run --ignore-installed --disable-pip-version-check $(1) '.[dev]' \
	  | sed -n 's/^Would install //p' | tr ' ' '\n' | grep -v '^handoff-' | sed 's/-\([^-]*\)$$/==\1/' | LC_ALL=C sort -f
endef

lock: ## resolve the ranges of pyproject.toml again and write both lock files
	@$(PYTHON) -m venv --clear $(VENV).lock
	@$(VENV).lock/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@{ echo "# Made by make lock: every version that is tested, on machines without an NVIDIA GPU."; \
	  $(call resolve,'torch==$(TORCH)+cpu'); } > requirements.lock.new
	@grep -v '^torch==' requirements.lock.new > $(VENV).lock/others
	@{ echo "# Made by make lock: the same versions with the CUDA build of torch, on machines with an NVIDIA GPU."; \
	  $(call resolve,-c $(VENV).lock/others 'torch===$(TORCH)') | sed 's/^torch==/torch===/'; } > requirements-gpu.lock.new
	@grep -q '^torch==' requirements.lock.new && grep -q '^torch==' requirements-gpu.lock.new
	@mv requirements.lock.new requirements.lock && mv requirements-gpu.lock.new requirements-gpu.lock
	@rm -rf $(VENV).lock

STRESS_S := 900

stress: $(INSTALLED) ## both sides killed 50 times in mid-transfer, 20 rounds of random aborts, on every transport
	@$(BIN)/python -m pytest tests/integration/test_transports.py --stress --timeout $(STRESS_S) $(ARGS)

FUZZ_S  := 60
ATHERIS := 3.0.0

fuzz: $(INSTALLED) ## what arrives over the KV port, fed by a coverage-guided fuzzer for FUZZ_S seconds a target
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(INSTALL) atheris==$(ATHERIS)
	@for target in blob ticket head quantised told introduction; do $(BIN)/python -m tests.fuzz $$target $(FUZZ_S) || exit 1; done

clean: ## remove the environment and every cache of the tools; models stay
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f shared/kv/_copy_rows.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
