# make demo   sets everything up and writes text with the embedded model, plainly and speculatively
# make test   sets everything up and runs the tests
# make check  linters, types and import layers
# make bench  the tables of README.md (about an hour on 2 cores; needs DATA, a folder described in docs/benchmarks.md)

PYTHON ?= python3
# The build of PyTorch: any 2.10 or later works; for CUDA give the one for your driver.
TORCH ?= torch==2.13.0
DATA ?= data
BIN := .venv/bin

.PHONY: demo test check bench clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench,test,check]'
	touch $@

demo: .venv/ready
	$(BIN)/outrider generate "Once upon a time, there was a little" --max-tokens 120 \
		--temperature 0.7 --top-p 0.9 --seed 7 --speculate draft_model:model=tiny-draft,k=4
	$(BIN)/outrider bench --suite stories --prompts 3 --max-tokens 256 --repeats 3 \
		--speculate ngram:k=8 --speculate draft_model:model=tiny-draft,k=4

test: .venv/ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
