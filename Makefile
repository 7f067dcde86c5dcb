# One command each for people and CI: run, demo, test, test-clients, bench, chaos, lint, typecheck, generate, freeze.
#
#   TORCH_INDEX=URL   take torch from that package index (PyTorch's CPU wheels, say) instead of pip's default one
#   PYTHON=python3.12 create the environment with that interpreter (3.10 or newer)

PYTHON ?= python3
VENV ?= .venv
STUBS_VENV ?= .venv-stubs
TORCH_INDEX ?=
ARGS ?=

CLIENT_TESTS = tests/clients tests/conformance/test_conformance_clients.py

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run demo test test-clients bench chaos lint typecheck generate freeze clean

run: $(VENV)/.run
	$(VENV)/bin/cosmos-ctrl run $(ARGS)

demo: $(VENV)/.run-light
	$(VENV)/bin/cosmos-ctrl demo

test: $(VENV)/.test $(STUBS_VENV)/.ready lint typecheck
	$(VENV)/bin/python -m pytest --numprocesses=auto --dist=loadfile $(ARGS)

# The clients in every language, those too that take more than a minute to build, and the scenarios that take long.
test-clients: $(VENV)/.test
	COSMOS_TEST_CLIENTS=all $(VENV)/bin/python -m pytest --numprocesses=auto --dist=loadfile $(CLIENT_TESTS) $(ARGS)

bench: $(VENV)/.test
	$(VENV)/bin/python tests/benchmarks/bench_ledger.py
	$(VENV)/bin/python tests/benchmarks/bench_reports.py
	$(VENV)/bin/python tests/benchmarks/bench_checkpoints.py

chaos: $(VENV)/.test
	$(VENV)/bin/python tests/chaos/run_chaos.py $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/buf lint
	$(VENV)/bin/python tools/frozen.py check
	$(VENV)/bin/lint-imports

typecheck: $(VENV)/.test
	$(VENV)/bin/mypy

generate: $(STUBS_VENV)/.ready $(VENV)/.test
	$(STUBS_VENV)/bin/python tools/generate.py .
	$(VENV)/bin/python tools/reference.py docs/reference

# The wire contract of this version, as its clients will hold us to it. Part of a release; what is frozen is not written again.
freeze: $(VENV)/.test
	$(VENV)/bin/python tools/frozen.py add

clean:
	rm -rf $(VENV) $(STUBS_VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The core, the service and the demo: no torch.
$(VENV)/.run-light: $(VENV)/bin/python pyproject.toml constraints.txt
	$(VENV)/bin/python $(PIP_INSTALL) -e .
	touch $@

# torch first and alone, so that its index serves nothing else.
$(VENV)/.run: $(VENV)/.run-light
	@echo "installing PyTorch and the demo's libraries (about 1.3 GB with CPU wheels), once"
	$(VENV)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[worker,demo]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[worker,objects,huggingface,demo,dev]'
	touch $@

# The lower end of the declared protobuf and grpcio range, which is also what generates the stubs: they load on everything newer.
$(STUBS_VENV)/.ready: tools/stubs-requirements.txt
	$(PYTHON) -m venv $(STUBS_VENV)
	$(STUBS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/stubs-requirements.txt
	touch $@
