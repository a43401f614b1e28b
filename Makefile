# Everything a person needs: `make demo` and `make test`. Both install what they use into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.PHONY: install demo test check lint types bench pins clean

install: $(VENV)/uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt \
	    -e '.[cuda-build,report]' --group dev

$(VENV)/uv:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# Tunes a real GEMM on this machine's CPU, emits the winner, verifies it and times it.
demo: install
	$(BIN)/kt tune gemm 512x512x512 --dtype fp32 --trials 64 --target cpu --log $(DEMO)/logs
	$(BIN)/kt show $(DEMO)/logs
	$(BIN)/kt apply $(DEMO)/logs -o $(DEMO)/gemm.c --force --verify --bench

test: install
	$(BIN)/pytest -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types test

# Class cpu-gemm of the benchmark, with its table; about 15 minutes on two cores.
bench: install
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python benchmarks/cpu_gemm.py

# Re-resolves the pinned versions (one host-free file for every supported Python).
pins: $(VENV)/uv
	$(BIN)/uv pip compile --quiet --universal --no-emit-index-url --all-extras --group dev \
	    pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info $(DEMO)
