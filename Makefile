# Everything a person needs: `make demo` and `make test`. Both install what they use into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
SOURCES := $(shell find spaces logs costmodel tuner -type d -not -name __pycache__)
# uv trusts what pip trusts.
export UV_SYSTEM_CERTS ?= 1

.PHONY: install demo test check lint types replay-logs bench pins clean

install: $(VENV)/installed

# Links are renewed only when a file came or went: a reinstall would pull the package from under a
# running kt.
$(VENV)/installed: $(VENV)/uv pyproject.toml constraints.txt $(SOURCES)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt \
	    -e '.[cuda-build,report]' --group dev
	@touch $@

$(VENV)/uv:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# Tunes each operator on this machine's CPU, emits the winners, verifies and times them: 2 minutes.
demo: install
	$(BIN)/kt tune gemm 512x512x512 --dtype fp32 --trials 64 --target cpu --log $(DEMO)/gemm
	$(BIN)/kt tune conv2d 1x28x28x128,128x3x3 --pad 1 --epilogue bias+relu --trials 48 --target cpu \
	    --log $(DEMO)/conv2d
	$(BIN)/kt tune attention 1x8x512x64 --causal --trials 32 --target cpu --log $(DEMO)/attention
	for operator in gemm conv2d attention; do \
	    $(BIN)/kt show $(DEMO)/$$operator && \
	    $(BIN)/kt apply $(DEMO)/$$operator -o $(DEMO)/$$operator.c --force --verify --bench || exit; \
	done

# What times, kills and fills disks runs alone, the rest side by side.
test: install
	$(BIN)/pytest -q -n 2 -m "not alone"
	$(BIN)/pytest -q -m alone

# Every batch of every committed log, recomputed without a device; `make test` takes a sample.
replay-logs: install
	KT_ALL_LOGS=1 $(BIN)/pytest -q tests/test_logs_replay.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types test

# Class cpu-gemm of the benchmark and the README's tables; about 20 minutes on two cores.
bench: install
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python benchmarks/run.py --class cpu-gemm
	$(BIN)/python benchmarks/tables.py

# Re-resolves the pinned versions (one host-free file for every supported Python).
pins: $(VENV)/uv
	$(BIN)/uv pip compile --quiet --universal --no-emit-index-url --all-extras --group dev \
	    pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info $(DEMO)
