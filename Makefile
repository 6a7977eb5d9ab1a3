# Targets for people and CI. `make help` lists them; scripts/setup does the setting up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
python := .venv/bin/python
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

.PHONY: help setup demo test lint soak bench bench-density bench-proxy bench-on-demand recipes clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install what is missing: system packages, .venv, the guest daemon and kernel, a library for QEMU
	@scripts/setup

demo: setup ## set up, then the main job: build a snapshot, launch it, fork it into 4 candidate patches
	@$(python) examples/demo.py

# One process more than there are processors: a good part of the tests waits for machines to start and end.
test: lint ## set up, lint, then all tests
	@$(python) -m pytest -n $$(( $$(nproc) + 1 )) --maxprocesses 4 --dist worksteal

lint: setup ## set up, then formatters, linters and type checks
	@$(python) -m ruff format --check .
	@$(python) -m ruff check .
	@$(python) -m mypy -p aenv_run -p aenv_build
	@$(python) -m mypy tests/perf
	@scripts/lint-go
	@cc -std=c11 -O2 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror -fsyntax-only engine/ram.c

soak: setup ## set up, then the stores on a second S3 server, the long forms of the contracts, 5000 orders of a collector and writers, every crash point and 200 kills, 50 snapshots of a guest that writes (gVisor: 30), all of E2B's clients, then tests/crash and tests/e2e 20 times, each driver
	@scripts/setup-soak
	@AENV_SWIFT=1 $(python) -m pytest --timeout 1800 tests/contracts/test_store_contract.py tests/contracts/test_store_swift.py tests/e2e/test_bucket.py
	@AENV_SOAK=1 $(python) -m pytest --timeout 1800 tests/contracts tests/e2e
	@AENV_SNAPSHOTS=50 $(python) -m pytest --timeout 1800 tests/contracts/test_consistency.py -k qemu
	@AENV_SNAPSHOTS=30 $(python) -m pytest --timeout 1800 tests/contracts/test_consistency.py -k gvisor
	@AENV_SCHEMA_EXAMPLES=40 $(python) -m pytest --timeout 1800 tests/unit/test_api_schema.py
	@AENV_GC_SCHEDULES=2500 $(python) -m pytest --timeout 1800 tests/unit/test_gc_schedules.py tests/unit/test_repair.py
	@AENV_CRASH_POINTS=1000000 AENV_CRASH_ROUNDS=200 $(python) -m pytest --timeout 1800 tests/crash
	@AENV_SDK_EVERY=1 $(python) -m pytest --timeout 1800 tests/sdk
	@for round in $$(seq 10); do for driver in qemu gvisor; do \
	  AENV_DRIVER=$$driver AENV_CRASH_ROUNDS=20 $(python) -m pytest tests/crash tests/e2e || exit; done; done

bench: setup ## set up, then measure each driver beside its bare engine: launch, pause, fork, reset, close, memory
	@$(python) -m tests.perf.bench
	@$(python) -m tests.perf.stops

bench-on-demand: setup ## set up, then measure a first command of a 2 GB image from an empty cache, over limited links
	@$(python) -m tests.perf.on_demand

bench-proxy: setup ## set up, then measure calls through `aenv serve` against the same straight to the daemon
	@$(python) -m tests.perf.proxy

bench-density: setup ## set up, then start sandboxes of one snapshot until 64 run or memory says stop
	@$(python) -m tests.perf.density

recipes: setup ## set up, then build every ready recipe from nothing, launch it and check it; goes on where it ended
	@$(python) -m tests.perf.recipes

clean: ## remove all that was built in this checkout (system packages and AENV_HOME stay)
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
