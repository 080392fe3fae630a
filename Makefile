# kvbm: `make help` lists what there is. Everything runs in .venv, which deploy/setup_env.py makes and keeps up to date.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(or $(firstword $(foreach name,python3.11 python3.12 python3.10 python3,$(if $(shell $(name) -c '' 2>/dev/null && echo yes),$(name)))),$(error no Python 3.10+ found: install python3.11, or say make PYTHON=/path/to/python3))
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
DYNAMO_VENV ?= .venv-dynamo
CONTRACT ?= .contract
BIN := $(VENV)/bin
SETUP_FLAGS ?=
# Three: tests that wait leave two cores idle. A worker that dies ends the run, as it does without workers;
# pytest-xdist would run what killed it again.
SIDE_BY_SIDE := --numprocesses=3 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 --costs=40
# Bytecode is written, whatever the shell says: engines and ranks are processes that import the same files, and
# uv installs none.
export PYTHONDONTWRITEBYTECODE :=
# The order of sets of strings is the same in each run: tests/conftest.py has the seed of everything else.
PYTEST = PYTHONHASHSEED=0 KVBM_CONTRACT_SOURCES=$(CONTRACT) KVBM_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
	KVBM_DYNAMO_PYTHON=$(abspath $(DYNAMO_VENV))/bin/python $(BIN)/python -m pytest $(SIDE_BY_SIDE)
SLOW := valkey or mooncake or etcd or nats or server or packaging
PYTEST_ARGS ?=
NIGHTLY_MINUTES ?= 60
BENCH_ARGS ?=
DEMO_ARGS ?=
ONLY ?=

.PHONY: help setup setup-sglang setup-dynamo demo newest locks contract checked test quick packaging nightly lint typecheck docs bench bench-full clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## the environment: vLLM (CUDA or CPU), kvbm, tools (SETUP_FLAGS=--without-engine for the core alone)
	@$(PYTHON) deploy/setup_env.py $(VENV) --dev --demo $(SETUP_FLAGS)

setup-sglang: ## a second environment, with SGLang (its pins and vLLM's do not agree)
	@$(PYTHON) deploy/setup_sglang.py $(SGLANG_VENV)

setup-dynamo: ## a third environment, with NVIDIA Dynamo and the vLLM it asks for
	@$(PYTHON) deploy/setup_dynamo.py $(DYNAMO_VENV)

demo: ## serve a tiny model with kvbm: cold, device hit, host hit, disk hit after kill -9
	@$(PYTHON) deploy/setup_env.py $(VENV) --demo $(SETUP_FLAGS)
	@$(BIN)/python -m benchmarks.demo $(DEMO_ARGS)

newest: # all tests with the newest versions that the ranges allow, in environments of their own
	@KVBM_SETUP_NEWEST=1 $(MAKE) --no-print-directory test VENV=$(VENV)-newest SGLANG_VENV=$(SGLANG_VENV)-newest DYNAMO_VENV=$(DYNAMO_VENV)-newest

locks: # the newest versions that the ranges allow, for deploy/locks
	@$(PYTHON) deploy/write_locks.py

contract: # interfaces of the other supported vLLM and SGLang versions, for the contract tests
	@$(PYTHON) deploy/contract_sources.py $(CONTRACT)

checked: setup setup-sglang contract setup-dynamo lint typecheck # what comes before the tests; much of it can be done side by side

test: ## everything but nightly: lint, types, real engines first, then the rest
	@$(MAKE) --no-print-directory --jobs=2 checked
	@$(PYTEST) --second-try $(PYTEST_ARGS)

quick: contract lint typecheck ## before each commit: lint, types, and the tests that start no engine and no server
	@$(PYTEST) -m "not ($(SLOW))" tests/unit tests/property tests/contract $(PYTEST_ARGS)

packaging: setup ## the tests that build wheels, the native module and environments; quick leaves them out
	@$(PYTEST) -m packaging $(PYTEST_ARGS)

nightly: ## what test leaves out, what was run longest ago first (NIGHTLY_MINUTES=60, 0: all; NIGHTLY_STATE=file)
	@$(MAKE) --no-print-directory --jobs=2 checked
	@$(PYTEST) --nightly --minutes=$(NIGHTLY_MINUTES) $(PYTEST_ARGS)

lint: setup ## ruff, rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . || { echo 'ruff found something: see above, or run $(BIN)/ruff format' >&2; exit 1; }

typecheck: setup ## mypy, strict
	@$(BIN)/mypy

docs: setup ## the documentation site, in build/site; a broken link is an error
	@$(BIN)/zensical build --strict

bench: setup ## all measurements beside the peers (ONLY=leader,transfer for some; BENCH_ARGS goes through)
	@$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(BENCH_ARGS)

bench-full: setup ## the same with more rounds
	@$(BIN)/python -m benchmarks --full $(if $(ONLY),--only $(ONLY)) $(BENCH_ARGS)

clean: ## remove the environment, caches and results
	rm -rf {$(VENV),$(SGLANG_VENV),$(DYNAMO_VENV)}{,-newest} $(CONTRACT) build dist kvbm_core/native/*.so demo-output benchmarks/results .bench-peers .hypothesis .mypy_cache .pytest_cache .ruff_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
