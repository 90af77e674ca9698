# Needs git, make and Python 3.11 or newer. Everything else is installed into .venv by the rules below; once it is there,
# every target works without a network, but for fuzz, which then fetches atheris, and test-servers.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 …` overrides it.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN   := .venv/bin
READY := .venv/.ready
TREE  := .venv/tree
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PIP   := $(BIN)/pip install -qq --no-build-isolation -c constraints.txt
# By an import hook, which finds new files at once; by default, an editable install is a tree of links, for type checkers.
EDITABLE := -C editable_mode=lenient -e
MYPY_ARGS := --config-file holdfast/pyproject.toml --cache-dir ../../.mypy_cache
# Processes that share the tests, file by file; more than two cores, since many tests wait for others. 0: none, the tests run in
# pytest itself. A test that takes too long is ended by a signal: a timeout by a thread would end its process, and say nothing.
JOBS  ?= 3
TORCH := $(shell grep '^torch==' constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Empty is as good as unset. Tests start hundreds of processes: without bytecode each of them compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-keeper demo-incremental demo-weights unit test nightly properties sim sim-broken mutants crash damage fuzz test-servers drills lint format bench bench-names bench-server gpu gpu-wheels soak torch-old torch-dcp frameworks docs docs-serve clean

help:  ## this list
	@echo "usage: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1	\2/p' Makefile

setup: $(READY)  ## install everything into .venv (the targets below do it by themselves)

demo: $(READY)  ## see it work: make demo [URI=s3://bucket/run | SERVER=s3|hdfs|az|gs] [DEMO_ARGS="…"]
	@$(if $(SERVER),$(BIN)/python tests/servers/with_server.py $(SERVER)) \
		$(BIN)/holdfast demo $(if $(SERVER),{uri},$(if $(URI),'$(URI)')) $(DEMO_ARGS)

demo-keeper: $(READY)  ## see hosts break down, and the steps that stay in memory: make demo-keeper [URI=s3://bucket/run] [DEMO_ARGS="…"]
	@$(BIN)/holdfast keeper demo $(if $(URI),'$(URI)') $(DEMO_ARGS)

demo-incremental: $(READY)  ## see what incremental saves cost, and survive: make demo-incremental [URI=s3://bucket/run] [DEMO_ARGS="…"]
	@$(BIN)/holdfast demo $(if $(URI),'$(URI)') --incremental $(DEMO_ARGS)

demo-weights: $(READY)  ## see engines follow a trainer's weights, through kills: make demo-weights [URI=s3://bucket/run] [DEMO_ARGS="…"]
	@$(BIN)/holdfast demo $(if $(URI),'$(URI)') --weights $(DEMO_ARGS)

# The light tests come first on CI, too: what they find is found within a minute.
unit: $(READY)  ## the tests that need no torch, no process and no server: under a minute
	@$(BIN)/pytest --light -n $(JOBS) --max-worker-restart 0 tests/unit tests/property $(TEST_ARGS)

# `pytest`, not `python -m pytest`: the latter would put this folder on the path, and every room would be there twice,
# as holdfast.planner and as planner.
test: $(READY)  ## run the tests, but slow ones whose neighbours prove nearly the same; skips are listed with their reasons
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -o timeout_method=signal $(TEST_ARGS)

# Each part runs, also when another one fails.
nightly: test-servers  ## run everything: all tests, the frameworks, fresh seeds, all mutants, the oldest torch, an hour of soak; hours
	@$(MAKE) -k nightly-tests frameworks sim sim-broken mutants torch-old properties damage crash soak

.PHONY: nightly-tests
nightly-tests:
	@$(MAKE) test TEST_ARGS='--nightly all'

sim: $(READY)  ## explore the simulator's schedules, some twenty a run: make sim [SEEDS=5000], or replay one run: make sim SEED=n
	@$(BIN)/python tests/simulation/simulate.py $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000)) $(SIM_ARGS)
	@$(if $(SEED)$(SIM_ARGS),,$(BIN)/python tests/simulation/simulate.py --channels --seeds $(or $(SEEDS),2000))

sim-broken: $(READY)  ## engines that are wrong on purpose: how many schedules it takes to catch each
	@$(BIN)/python tests/simulation/simulate.py --broken $(or $(SEEDS),3000)
	@$(BIN)/python tests/simulation/simulate.py --channels --broken 300

mutants: $(READY)  ## change the engine in one small way at a time, and see that tests notice: make mutants [ONLY=text] [SAMPLE=1]
	@$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only '$(ONLY)') $(if $(SAMPLE),--sample)

properties: $(READY)  ## property tests, with other examples each time, and more: make properties [EFFORT=20]
	@HOLDFAST_TEST_EFFORT=$(or $(EFFORT),20) $(BIN)/pytest --nightly all tests/property --timeout 7200 -o faulthandler_timeout=14400 $(TEST_ARGS)

# The oldest torch that pyproject.toml promises, in an environment of its own. Its wheels come from PyTorch's index for
# processors alone: those of PyPI bring gigabytes for GPUs.
TORCH_OLD       ?= 2.6.0
TORCH_OLD_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_OLD_ENV   := .venv/torch-$(TORCH_OLD)
TORCH_OLD_TESTS := tests/distributed tests/unit/test_names.py tests/unit/test_lazy.py tests/unit/test_planner_placement.py \
	tests/unit/test_storage_*.py tests/unit/test_checkpointer.py tests/property/test_storage_states.py

torch-old: $(TORCH_OLD_ENV)/.ready  ## the tests of states, layouts and jobs on the oldest torch promised: make torch-old [TORCH_OLD=2.6.0]
	@$(TORCH_OLD_ENV)/bin/pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 -o timeout_method=signal --nightly all $(TORCH_OLD_TESTS) $(TEST_ARGS)

$(TORCH_OLD_ENV)/.ready: pyproject.toml constraints.txt | $(READY)
	@$(PYTHON) -m venv --clear $(TORCH_OLD_ENV)
	@grep -viE '^(torch|sympy|triton|nvidia[a-z0-9-]*|cuda[a-z0-9-]*)==' constraints.txt > $(TORCH_OLD_ENV)/constraints.txt
	@echo "torch $(TORCH_OLD), from $(TORCH_OLD_INDEX)"
	@$(TORCH_OLD_ENV)/bin/pip install -qq --index-url $(TORCH_OLD_INDEX) 'torch==$(TORCH_OLD)'
	@echo "torch==$(TORCH_OLD)" >> $(TORCH_OLD_ENV)/constraints.txt
	@$(TORCH_OLD_ENV)/bin/pip install -qq -c $(TORCH_OLD_ENV)/constraints.txt setuptools
	@$(TORCH_OLD_ENV)/bin/pip install -qq --no-build-isolation -c $(TORCH_OLD_ENV)/constraints.txt $(EDITABLE) '.[dev]'
	@touch $@

# No package has these tests: they come from a checkout of PyTorch's repository, at the tag of the torch in constraints.txt.
torch-dcp: $(READY)  ## PyTorch's own tests of DCP, with its writer and with ours: make torch-dcp PYTORCH=~/pytorch
	@$(BIN)/pip install -qq expecttest
	@$(BIN)/python tests/support/pytorch_dcp/run.py $(PYTORCH)/test/distributed/checkpoint

# The trainers that storage/integrations serves, in an environment of its own: `make setup` stays as fast as it is.
FRAMEWORKS_ENV := .venv/frameworks
# Wanted without what they depend on: torchtitan asks for a datasets that our fsspec is too new for, and needs but tyro here.
UNRESOLVED     := $(shell grep -E '^(torchtitan|torch_checkpointing|spmd_types)==' constraints-frameworks.txt)
# Of Megatron the newest release, too, whose metadata asks for a newer Python than its code does.
NEW_MEGATRON   := $(FRAMEWORKS_ENV)/megatron-0.19.2

frameworks: $(FRAMEWORKS_ENV)/.ready  ## the tests with the trainers themselves (Lightning, Hugging Face, DeepSpeed, Megatron, …); fetches them
	@$(FRAMEWORKS_ENV)/bin/pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 -o timeout_method=signal --nightly all tests/frameworks $(TEST_ARGS)
	@PYTHONPATH=$(CURDIR)/$(NEW_MEGATRON):$(CURDIR)/tests $(FRAMEWORKS_ENV)/bin/pytest -o timeout_method=signal --nightly all tests/frameworks/test_megatron.py -k 'not how_to' $(TEST_ARGS)

$(FRAMEWORKS_ENV)/.ready: pyproject.toml constraints.txt constraints-frameworks.txt | $(READY)
	@$(PYTHON) -m venv --clear $(FRAMEWORKS_ENV)
	@echo "$(TORCH), and the frameworks"
	@$(FRAMEWORKS_ENV)/bin/pip install -qq -c constraints.txt '$(TORCH)' setuptools
	@$(FRAMEWORKS_ENV)/bin/pip install -qq --no-build-isolation -c constraints.txt -c constraints-frameworks.txt \
		$(EDITABLE) '.[dev,lightning,hf,deepspeed,megatron,ray]' torchao tyro
	@$(FRAMEWORKS_ENV)/bin/pip install -qq --no-deps $(UNRESOLVED)
	@$(FRAMEWORKS_ENV)/bin/pip install -qq --no-deps --only-binary=:all: --python-version 3.12 --ignore-requires-python \
		--target $(NEW_MEGATRON) megatron-core==$(NEW_MEGATRON:$(FRAMEWORKS_ENV)/megatron-%=%)
	@touch $@

drills: $(READY) test-servers  ## what make test leaves out: real servers killed, cut off and filled up, and one more of a kind; half an hour
	@$(BIN)/pytest --nightly all -m drill tests --ignore tests/crash --ignore tests/frameworks $(TEST_ARGS)

crash: $(READY)  ## kill saves and cut their power at every point, not at some; an hour, best as root
	@HOLDFAST_TEST_CRASH_POINTS=all $(BIN)/pytest --nightly all tests/crash -o faulthandler_timeout=14400 $(TEST_ARGS)

damage: $(READY)  ## every byte and every length of a small checkpoint, before every reader; half an hour, or PART=0-2000 of them
	@HOLDFAST_TEST_DAMAGE=$(or $(PART),all) $(BIN)/pytest --nightly all tests/property/test_damage.py -o faulthandler_timeout=14400 $(TEST_ARGS)

# With one heap for all threads: each of several would stay at its greatest size, which looks like a leak.
soak: $(READY)  ## everything at once, at random, on storage that fails: make soak [MINUTES=60] [SEED=n] [URI=s3://bucket/path]
	@MALLOC_ARENA_MAX=1 PYTHONPATH=tests $(BIN)/python -m support.soak --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(if $(URI),--uri '$(URI)')

fuzz: $(READY)  ## fuzz manifests, headers, URIs and configuration files with atheris: make fuzz [SECONDS=60] [TARGET=all] [FOUND=folder]
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) $(EDITABLE) '.[fuzz]'
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { \
		echo "atheris has no wheel for this machine or Python: fuzzing is left to tests/property/test_fuzzed.py" >&2; exit 1; }
	@$(BIN)/python tests/fuzz/run.py $(or $(TARGET),all) $(or $(SECONDS),60) $(FOUND)

test-servers:  ## install the servers that some tests want, into .servers; without them those tests are skipped
	@for script in tests/servers/install/*.sh; do SECONDS=0; \
		$$script "$(CURDIR)/.servers" && echo "  $$SECONDS s" || echo "$$script failed: its tests will be skipped" >&2; done

lint: $(READY)  ## style, format, types, and the arrows between the rooms
	@echo "== ruff check";       $(BIN)/ruff check --output-format concise .
	@echo "== ruff format";      $(BIN)/ruff format --check --output-format concise . || { echo "To mend: make format" >&2; exit 1; }
	@echo "== mypy --strict";    cd $(TREE) && ../bin/mypy $(MYPY_ARGS) -p holdfast | sed 's|^holdfast/||'
	@echo "== of typed tests";   cd $(TREE) && MYPYPATH=holdfast/tests ../bin/mypy $(MYPY_ARGS) --explicit-package-bases \
		holdfast/tests/unit/test_planner_*.py holdfast/tests/property/test_planner_*.py | sed 's|^holdfast/||'
	@echo "== import contracts"; $(BIN)/lint-imports --no-logo

format: $(READY)  ## mend style and format where a machine can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(READY)  ## the documentation as a site, in build/docs/html; a link that leads nowhere is an error
	@$(BIN)/python docs/site/build.py

docs-serve: docs  ## the same, served on this host: make docs-serve [PORT=8000]
	@$(BIN)/python -m http.server $(or $(PORT),8000) --bind 127.0.0.1 --directory build/docs/html

# Needs no .venv and no network. The interpreter of .venv where it is there, else the system's.
gpu:  ## prove it on a GPU: tests/gpu and a benchmark, in ten minutes; without one it says so: make gpu [OUT=folder] [GPU_ARGS=--tiny]
	@if test -x $(BIN)/python; then python=$(BIN)/python; else python=$(PYTHON); fi; \
		$$python tests/gpu/run.py --out $(or $(OUT),gpu-results) $(GPU_ARGS)

# Holdfast needs xxhash; obstore and lz4 are for those of its parts that can do without. All for a machine as `make gpu` expects it.
gpu-wheels:  ## fetch what a bare machine with a GPU may lack into wheels/ (x86-64, Python 3.12)
	@$(or $(PYTHON),python3) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-c constraints.txt -d wheels xxhash obstore lz4
	@du -sh wheels

bench:  ## how to run the benchmarks
	@echo "Each with --help, and --tiny for a run of seconds:"
	@for name in $$($(MAKE) -s bench-names); do echo "  $(BIN)/python -m holdfast.bench.$$name"; done

bench-server: $(READY)  ## holdfast bench on a server of the tests: make bench-server SERVER=s3 [SERVER_ARGS="…"] [BENCH_ARGS="…"]
	@test -n "$(SERVER)" || { echo "usage: make bench-server SERVER=s3, or SERVER=hdfs" >&2; exit 2; }
	@$(BIN)/python tests/servers/with_server.py $(SERVER_ARGS) $(SERVER) $(BIN)/python -m holdfast bench {uri} $(BENCH_ARGS)

bench-names:
	@grep -l '^if __name__ == "__main__":' bench/[!_]*.py | sed -e 's|^bench/||' -e 's|\.py$$||' | sort

clean:  ## remove .venv, caches and build leftovers
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Holdfast needs Python 3.11 or newer; $(or $(PYTHON),python3) is: $$($(or $(PYTHON),python3) --version 2>&1)." >&2; \
		echo "Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "This Python cannot make virtual environments (on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "setup 1/3: .venv, with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "setup 2/3: $(TORCH) (large; minutes on a slow line)"
	@$(PIP) '$(TORCH)' setuptools
	@echo "setup 3/3: holdfast itself, editable, and the tools for tests and checks"
	@$(PIP) $(EDITABLE) '.[dev]'
	@mkdir -p $(TREE) && ln -sfn ../.. $(TREE)/holdfast  # for mypy, which cannot follow an editable install
	@touch $@
