# Every task of the project. Nothing needs more than python3 (3.11 or newer), make, git and gcc: `make setup`, on which
# all others depend, makes the environment, and is done in no time once it was done.

PYTHON ?= python3
VENV ?= .venv
# Where torch's CPU build comes from, if pip's own configuration does not have it, e.g.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Empty: the package index's build, which on Linux brings the CUDA libraries with it.
TORCH_INDEX ?=
# Of each stage, 4,096 tokens each.
TRAIN_STEPS ?= 1600
# Tests wait for processes more than they compute. A file's tests stay together: they share a cluster. Files begin in
# the order of tests/order.py.
TEST_PROCESSES ?= 3
# Not empty: `make test` runs the tests marked `long`, too.
LONG ?=
SOAK_SECONDS ?= 600
# Drawn, and told, if empty.
SOAK_SEED ?=
FUZZ_SECONDS ?= 60
# All targets, if empty.
FUZZ_TARGET ?=
FUZZ_SEED ?=
CHAOS_SECONDS ?= 600
PROVE_SECONDS ?= 180
# Drawn, and told, if empty.
CHAOS_SEED ?=

# Where vLLM is installed, whose dependencies exclude some of the versions that are used here.
VLLM_VENV ?= .vllm
# More arguments for `make test-vllm`, such as --last-failed.
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
TRITON_STAMP := $(VENV)/.triton
# One thread per process: tests and cluster share the cores, and OpenMP's spinning waiters would take them away.
QUIET_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# Many images tell Python to keep no compiled modules. Then each of the hundreds of processes that tests start compiles
# all that it imports, which is more than half of its start.
export PYTHONDONTWRITEBYTECODE :=
# Its numba is another version, whose compiled kernels must not replace those of $(VENV). The warnings are vLLM's own.
VLLM_PYTEST = NUMBA_CACHE_DIR=$(abspath $(VLLM_VENV))/numba REQUIRE_VLLM=1 $(QUIET_THREADS) $(VLLM_VENV)/bin/python -m pytest \
  -W ignore::DeprecationWarning -W ignore::FutureWarning tests/vllm_worker

.PHONY: help setup lock docs demo test test-kernels test-nightly gpu-proof check static format proto chart train bench clients test-vllm compare test-rdma test-rdma-one soak-messenger soak-rdma fuzz chaos prove clean distclean

help:
	@echo "make demo    a whole cluster under a replayed trace, its answers verified; writes out/demo/report.html"
	@echo "make test    all checks and tests; with LONG=1 also the long ones, as .ci/run does"
	@echo "make test-nightly  the tests that take long, with and without vLLM, 10,000 schedules of the simulation and every mutant; records all outcomes under tests/"
	@echo "make gpu-proof  what is written for GPUs and needs one to be proven, and the engine's speed, in at most 20 minutes; status 3 without a GPU"
	@echo "make test-rdma  the messenger's tests over real verbs, in a VM with soft-RoCE that is built once; no KVM needed"
	@echo "make test-rdma-one  what of it runs in one VM: what .ci/run runs"
	@echo "make test-vllm  the tests of vLLM as an engine, on CPUs; its environment is built once, in $(VLLM_VENV)"
	@echo "make docs    the documentation site, into out/site; every link is checked"
	@echo "make check   format, lint, import rules, house rules, types, generated code, every test importable"
	@echo "make setup   the virtual environment in $(VENV); TORCH_INDEX=URL for torch's CPU build"
	@echo "make lock    write the lock files again after a change of constraints.txt or pyproject.toml; needs PyPI"
	@echo "make format  apply the formatter and the safe fixes"
	@echo "make proto   generate Python from proto/"
	@echo "make chart   generated files of the deployment: schemas, the chart's table, golden renders"
	@echo "make train   train the next bundled model, six stages of TRAIN_STEPS=$(TRAIN_STEPS), into .train/base6/model"
	@echo "make bench   run every benchmark"
	@echo "make clients the openai, anthropic, Open WebUI, aiperf, guidellm and lm-eval clients against a live cluster; installs them in .clients"
	@echo "make compare 1 prefill + 1 decode worker against 2 aggregated ones, on the same trace and cores"
	@echo "make soak-messenger  load and faults for the messenger, SOAK_SECONDS=$(SOAK_SECONDS), SOAK_SEED=N"
	@echo "make soak-rdma  the same over real verbs, in a VM"
	@echo "make fuzz    fuzz what the cluster parses, FUZZ_SECONDS=$(FUZZ_SECONDS), FUZZ_TARGET=NAME, FUZZ_SEED=N; into out/fuzz"
	@echo "make chaos   random faults in a live cluster under mixed load, CHAOS_SECONDS=$(CHAOS_SECONDS), CHAOS_SEED=N; needs root"
	@echo "make prove   the roles in a simulated world under random faults, PROVE_SECONDS=$(PROVE_SECONDS), and every mutant"
	@echo "make clean   remove caches and output; distclean: the environment too"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock requirements-dev.lock .ci/install.py moonpool/kernel_compilation.py
	$(PYTHON) .ci/install.py $(VENV) $(TORCH_INDEX)
	$(QUIET_THREADS) $(BIN)/python -m moonpool.kernel_compilation
	@touch $@

lock:
	$(BIN)/python .ci/lock.py write $(TORCH_INDEX)

demo: $(STAMP)
	$(BIN)/python -m moonpool demo

test: $(TRITON_STAMP)
	@mkdir -p out
	$(MAKE) --no-print-directory -j2 static test-kernels
	$(QUIET_THREADS) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	  $(if $(LONG),-m "not nightly and not gpu") --junitxml=out/tests.xml

test-kernels: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tests.compile_kernels

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir out/site

test-nightly: $(STAMP) $(VLLM_STAMP)
	@mkdir -p out
	rm -f out/nightly.xml out/nightly_vllm.xml
	$(QUIET_THREADS) $(BIN)/python -m pytest -m nightly --junitxml=out/nightly.xml; \
	  $(VLLM_PYTEST) -m nightly --junitxml=out/nightly_vllm.xml; \
	  $(BIN)/python .ci/report_tests.py out/nightly.xml --with out/nightly_vllm.xml --record tests/nightly.json \
	    --live-matrix tests/live_matrix.json; status=$$?; \
	  $(BIN)/python -m tools.prove --schedules 10000 --mutants --out tests/prove.json || status=1; \
	  $(BIN)/python -m benchmarks.figures write; exit $$status

test-vllm: $(VLLM_STAMP)
	@mkdir -p out
	$(VLLM_PYTEST) --junitxml=out/vllm.xml $(PYTEST_ARGS)

# The kernels of GPUs run in Triton's interpreter.
$(TRITON_STAMP): $(STAMP) requirements-cuda.lock
	$(PYTHON) .ci/install.py $(VENV) --triton
	@touch $@

$(VLLM_STAMP): pyproject.toml requirements-cpu.lock requirements-vllm.lock .ci/install.py moonpool/kernel_compilation.py
	$(PYTHON) .ci/install.py $(VLLM_VENV) $(TORCH_INDEX) --vllm
	NUMBA_CACHE_DIR=$(abspath $(VLLM_VENV))/numba $(QUIET_THREADS) $(VLLM_VENV)/bin/python -m moonpool.kernel_compilation
	@touch $@

# Its status is 3 without a GPU, which make turns into 2.
gpu-proof: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tools.gpu_proof

test-rdma: $(STAMP)
	$(BIN)/python -m tools.rdma_vm test

test-rdma-one: $(STAMP)
	$(BIN)/python -m tools.rdma_vm test --one

check: static
	$(BIN)/python -m pytest --collect-only -q >/dev/null || $(BIN)/python -m pytest --collect-only -q

# What of `check` the tests do not find out themselves.
static: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/generate_protos.py check
	$(BIN)/python .ci/check_types.py
	$(BIN)/python tools/house.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	$(BIN)/python .ci/generate_protos.py write

chart: $(STAMP)
	$(BIN)/python .ci/generate_chart.py write

train: $(STAMP)
	$(BIN)/python -m tools.training.prepare
	@set -e; weights=; for stage in 1 2 3 4 5 6; do \
	  run=.train/base$$stage; \
	  $(BIN)/python -m tools.training.train --stage $$stage --steps $(TRAIN_STEPS) --threads $$(nproc) --run $$run $$weights; \
	  $(BIN)/python -m tools.training.export $$run/last.pt $$run/model; weights="--weights $$run/model"; \
	done

bench: $(STAMP)
	@set -e; for script in $(wildcard benchmarks/*.py); do echo "== $$script"; $(BIN)/python "$$script"; done
	@echo "== benchmarks.frontend"; $(BIN)/python -m benchmarks.frontend

clients: $(STAMP)
	$(BIN)/python -m benchmarks.clients $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

compare: $(STAMP)
	$(BIN)/python -m benchmarks.disaggregation

soak-messenger: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tools.soak --seconds $(SOAK_SECONDS) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

fuzz: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tools.fuzz --seconds $(FUZZ_SECONDS) $(if $(FUZZ_TARGET),--target $(FUZZ_TARGET)) \
	  $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

soak-rdma: $(STAMP)
	$(BIN)/python -m tools.rdma_vm soak --seconds $(SOAK_SECONDS) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

chaos: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tools.chaos --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

prove: $(STAMP)
	$(QUIET_THREADS) $(BIN)/python -m tools.prove --seconds $(PROVE_SECONDS) --mutants

clean:
	rm -rf out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV) .clients .rdma_vm
