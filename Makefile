# `make` lists the targets. Each sets up what it needs in .venv, once; see .ci/venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv demo demo-gpu test test-vllm test-sglang conformance-sglang conformance-vllm lint type sim sim-vllm planted mutants fuzz chaos bench bench-lmcache bench-vllm bench-sglang proto \
  gpu-check cluster-up cluster-down release clean collected

# Where bytecode is not to be written, each of the thousands of processes that tests start would
# compile all of kvd anew: half of its start.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Most tests wait more than they compute: so many modules run at a time, on two processors too.
# Those with slow tests come first (tests/conftest.py). A worker that a hang ended is not replaced:
# another one might wait for ever for its work.
BESIDE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -n
TESTS_BESIDE ?= 4
VLLM_TESTS_BESIDE ?= 3

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | \
	  while IFS=$$'\t' read -r target text; do printf '  make %-16s %s\n' "$$target" "$$text"; done

venv: ## Make .venv, or bring it up to date
	@.ci/venv dev

demo: ## Run a real model with its KV cache in kvd, restart it, and load the cache back
	@.ci/venv demo
	@$(BIN)/kvd demo

demo-gpu: ## Time to first token on a GPU, computed and loaded (ARGS='--device cpu --shape tiny' anywhere)
	@if [ -x $(BIN)/python ]; then exec $(BIN)/python -m examples.gpu $(ARGS); fi; \
	  exec python3 -m examples.gpu $(ARGS)

test: ## Lint, types, and every test that needs no GPU and no vLLM
	@.ci/venv dev demo tiers
	@$(MAKE) --no-print-directory -j2 --output-sync=target type lint collected
	@$(PYTEST) $(BESIDE) $(TESTS_BESIDE) $(ARGS)

collected: # else each of pytest's processes rewrites the asserts of all tests
	@$(PYTEST) --collect-only -q >/dev/null 2>&1 || true

test-vllm: ## Tests with real vLLM engines on the CPU (in .venv-vllm, 1.9 GB)
	@.ci/venv
	@.ci/venv vllm; made=$$?; [ $$made = 3 ] && exit 0; [ $$made = 0 ] && \
	  .venv-vllm/bin/python -m pytest $(BESIDE) $(VLLM_TESTS_BESIDE) tests/vllm $(ARGS)

test-sglang: ## Tests with SGLang's own controllers and pools on the CPU (in .venv-sglang, 300 MB)
	@.ci/venv dev demo
	@.ci/venv sglang; made=$$?; [ $$made = 3 ] && exit 0; [ $$made = 0 ] && \
	  .venv-sglang/bin/python -m pytest $(BESIDE) $(VLLM_TESTS_BESIDE) tests/sglang $(ARGS)

conformance-vllm: ## vLLM's own tests, with the daemon in the place of vLLM's cache (47 MB fetched)
	@.ci/venv
	@.ci/venv vllm; made=$$?; [ $$made = 3 ] && exit 0; [ $$made = 0 ] && \
	  $(BIN)/python -m tests.vllm_conformance $(ARGS)

conformance-sglang: ## SGLang's own tests and test kits, with kvd as its storage backend, on the CPU
	@.ci/venv dev demo
	@.ci/venv sglang; made=$$?; [ $$made = 3 ] && exit 0; [ $$made = 0 ] && \
	  .venv-sglang/bin/python -m tests.sglang.conformance $(ARGS)

lint: ## Format, lint, import directions, protocol
	@.ci/venv dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo --no-cache >/dev/null || $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/buf lint proto
	@.ci/breaking
	$(BIN)/python proto/generate.py --check

type: ## mypy, strict
	@.ci/venv dev demo
	$(BIN)/mypy

sim: ## Simulation of the whole (SEEDS=how many, 200; STEPS=of each, 2000; SEED=one, with its journal)
	@.ci/venv dev
	@$(BIN)/python -m tests.simulation.whole --seeds $${SEEDS:-200} --steps $${STEPS:-2000} \
	  $(if $(SEED),--seed $(SEED)) $(ARGS)

sim-vllm: ## The same with an engine of vLLM in each world (SEEDS=how many, 20; in .venv-vllm)
	@.ci/venv
	@.ci/venv vllm && .venv-vllm/bin/python -m tests.vllm.simulated --seeds $${SEEDS:-20} \
	  --steps $${STEPS:-2000} $(if $(SEED),--seed $(SEED)) $(ARGS)

planted: ## Whether the simulation catches each planted bug, and with how many seeds (ARGS=--seeds 40)
	@.ci/venv dev
	@$(BIN)/python -m tests.simulation.planted $(ARGS)

mutants: ## Whether tests see each small change of kvd/core (ARGS='--sample 400'; '--room pool')
	@.ci/venv dev mutation
	@$(BIN)/python -m tests.mutation $(ARGS)

fuzz: ## What may not be sent, at every parser and a real daemon (MINUTES=how long, 5)
	@.ci/venv dev
	@$(BIN)/python -m tests.fuzz --minutes $${MINUTES:-5} $(ARGS)

chaos: ## Kill, freeze, fill and damage real processes, and check every byte (MINUTES=how long, 10)
	@.ci/venv dev
	@$(BIN)/python -m tests.chaos --minutes $${MINUTES:-10} $(ARGS)

bench: ## Benchmarks: tables, and JSON with machine and commit (ARGS=names)
	@.ci/venv dev bench
	@$(BIN)/python -m benchmarks $(ARGS)

soak: ## Engines replay traces for long, and whether anything grows (MINUTES=60)
	@.ci/venv dev bench
	@$(BIN)/python -m benchmarks.soak --minutes $${MINUTES:-60} $(ARGS)

bench-lmcache: ## Lookups, copies and capacity beside LMCache's server in the same run (1.4 GB)
	@.ci/venv bench
	@.ci/venv lmcache
	@$(BIN)/python -m benchmarks.lmcache $(ARGS)

bench-vllm: ## Benchmarks of the connector under vLLM, in the same form (ARGS=names)
	@.ci/venv bench demo
	@.ci/venv vllm
	@$(BIN)/python -m benchmarks.vllm $(ARGS)

bench-sglang: ## SGLang's storage backend beside memcpy and its file backend (ARGS='--rounds 24')
	@.ci/venv dev demo
	@.ci/venv sglang
	@.venv-sglang/bin/python -m benchmarks.sglang $(ARGS)

proto: ## Make the stubs from proto/
	@.ci/venv dev
	$(BIN)/python proto/generate.py

gpu-check: ## On a GPU: probe, tests, stress, copies beside their bars, demo (5 minutes; no .venv)
	@python3 -m benchmarks.gpu.check $(ARGS)

cluster-up: ## Start a Mooncake Store on the loopback (ARGS='--megabytes 4096 --port 50051')
	@.ci/venv tiers
	@$(BIN)/python -m examples.cluster up $(ARGS)

cluster-down: ## End it
	@.ci/venv tiers
	@$(BIN)/python -m examples.cluster down

release: ## Wheels, sdists and the chart into dist/, each installed and tried (docs/releasing.md)
	@.ci/venv dev charts
	@.ci/release

clean: ## Remove what builds and tests made (the environments stay)
	rm -rf build dist client/dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
