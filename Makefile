# Every target sets up what it needs from a fresh clone, given git, make, bash and any Python 3.12 or newer; those of GPUs
# run with the JAX that is there.
SHELL := bash
.DEFAULT_GOAL := targets
.PHONY: targets venv venv-parity demo serve test test-fast test-parity test-clients test-ray test-router test-tunix test-aot test-gpu bench bench-gpu soak lint types \
	docs docs-tables format lock clean

# Extra arguments for pytest or a script: make test ARGS="-k sampler"
ARGS ?=
# Test processes, one for each core; more than four meet at the memory of a laptop. One after the other: WORKERS=0.
WORKERS ?= auto
IN_PARALLEL := --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal
# What a GPU can say something about; tests/on_gpu.py names what of it is for CPUs only. A part: GPU_FOLDERS="gpu models".
GPU_FOLDERS := gpu attention sampling models cache programs memory engine
# The lock is made for this version of JAX; pyproject.toml says which versions are supported.
LOCK_JAX := 0.11.2

PYTHON_CPU := JAX_PLATFORMS=cpu .venv/bin/python

targets: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf '%-16s %s\n' "$$target" "$$text"; done

venv: .venv/.installed ## create .venv from requirements.lock
.venv/.installed: requirements.lock pyproject.toml
	@bash scripts/make_venv.sh .venv requirements.lock

# The version of CUDA that `make test-aot` compiles with: 12 or 13.
CUDA ?= 13
VENV_CUDA := .venv-cuda$(CUDA:13=)
$(VENV_CUDA)/.installed: requirements-cuda$(CUDA).lock pyproject.toml
	@bash scripts/make_venv.sh $(VENV_CUDA) requirements-cuda$(CUDA).lock

# No hashes here and any Python that torch has a wheel for: which of torch's builds is right depends on the machine.
venv-parity: .venv-parity/.installed ## create .venv-parity: torch and transformers, to compare results with
.venv-parity/.installed: requirements-parity.lock
	@test -x .venv-parity/bin/python || $(or $(PYTHON),python3) -m venv .venv-parity
	.venv-parity/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements-parity.lock
	@touch $@

demo: .venv/.installed ## several prompts at once from the embedded checkpoint
	@$(PYTHON_CPU) scripts/demo.py $(ARGS)

serve: .venv/.installed ## the embedded model over HTTP, on 127.0.0.1:8000; options with ARGS
	@$(PYTHON_CPU) -m jaxinfer serve $(ARGS)

test: .venv/.installed ## the test suite on the CPU; everything with ARGS=--slow
	$(PYTHON_CPU) -m pytest $(IN_PARALLEL) --durations 25 --durations-min 10 $(ARGS)

test-fast: .venv/.installed ## what compiles no engine, and five smoke tests: under three minutes
	$(PYTHON_CPU) -m pytest --fast $(IN_PARALLEL) $(ARGS)

test-parity: .venv/.installed .venv-parity/.installed ## the live comparison with transformers and torch
	$(PYTHON_CPU) -m pytest tests/parity $(ARGS)

test-clients: .venv/.installed .venv-clients/.installed ## the server with a client of the command line, in its own environment
	$(PYTHON_CPU) -m pytest tests/clients $(ARGS)

test-router: .venv/.installed .venv-router/.installed ## two servers and vLLM's router, in its own environment
	$(PYTHON_CPU) -m pytest tests/router $(ARGS)

test-ray: .venv-ray/.installed ## replicas under Ray and files under Ray Data, in an environment of their own
	JAX_PLATFORMS=cpu .venv-ray/bin/python -m pytest tests/ray $(ARGS)

test-tunix: .venv-tunix/.installed ## rollouts for tunix, beside its own engine, in an environment of its own
	JAX_PLATFORMS=cpu .venv-tunix/bin/python -m pytest tests/tunix $(ARGS)

ifneq ($(wildcard tests/aot/test_*.py),)
test-aot: $(VENV_CUDA)/.installed ## compile kernels and steps for an H200 without one (CUDA wheels, about 5 GB); CUDA=12
	JAX_PLATFORMS=cpu $(VENV_CUDA)/bin/python -m pytest tests/aot $(IN_PARALLEL) $(ARGS)
else
test-aot:
	@echo "tests/aot holds no tests: there is nothing to compile ahead of time"
endif

test-gpu: ## the GPU tests and the suite on the GPU, with $PYTHON (default python3) of a machine that has one
	JAX_PLATFORMS=cuda $(or $(PYTHON),python3) -m pytest --gpu $(GPU_FOLDERS:%=tests/%) $(ARGS)

bench: .venv/.installed ## throughput of the embedded checkpoint, as `jaxinfer bench throughput` measures it
	$(PYTHON_CPU) -m jaxinfer bench throughput $(ARGS)

bench-gpu: ## one GPU against what its card can do, in less than ten minutes, with $PYTHON of a machine that has a GPU
	$(or $(PYTHON),python3) scripts/bench_gpu.py $(ARGS)

lint: .venv/.installed ## ruff, rules and format; parts of docs/ that are generated
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@$(PYTHON_CPU) scripts/generate_docs.py --check

format: .venv/.installed ## let ruff format and repair what it can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

soak: .venv/.installed ## random clients against the server for 20 minutes; ARGS="--seconds 120" for less
	@$(PYTHON_CPU) scripts/soak.py $(ARGS)

types: .venv/.installed ## pyright
	.venv/bin/pyright

docs: .venv-docs/.installed ## build the site of docs/ into build/site; any warning is an error
	.venv-docs/bin/mkdocs build --strict --quiet

docs-tables: .venv/.installed ## write anew the parts of docs/ that describe code
	@$(PYTHON_CPU) scripts/generate_docs.py

.venv-docs/.installed: requirements-docs.lock
	@python=$$(bash scripts/find_python.sh) && "$$python" -m venv .venv-docs
	.venv-docs/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements-docs.lock
	@touch $@

.venv-ray/.installed: requirements-ray.lock pyproject.toml
	@bash scripts/make_venv.sh .venv-ray requirements-ray.lock

.venv-tunix/.installed: requirements-tunix.lock pyproject.toml
	@bash scripts/make_venv.sh .venv-tunix requirements-tunix.lock

.venv-clients/.installed: requirements-commands.lock
	@python=$$(bash scripts/find_python.sh) && "$$python" -m venv .venv-clients
	.venv-clients/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements-commands.lock
	@touch $@

.venv-router/.installed: requirements-router.lock
	@python=$$(bash scripts/find_python.sh) && "$$python" -m venv .venv-router
	.venv-router/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements-router.lock
	@touch $@

lock: .venv-lock/.installed ## resolve the lock files anew
	scripts/lock.sh $(LOCK_JAX)

.venv-lock/.installed:
	@python=$$(bash scripts/find_python.sh) && "$$python" -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@touch $@

clean: ## remove environments, caches and build products
	rm -rf .venv .venv-cuda .venv-clients .venv-cuda12 .venv-docs .venv-lock .venv-parity .venv-ray .venv-router .venv-tunix .jax_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
