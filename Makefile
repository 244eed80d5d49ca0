# make demo   three nodes with overlapping digit tasks: a table in about a minute
# make test   everything the project checks: style, types, tests
# make docs   the documentation as a site, in build/site; strict, and needs no network to build
# make nightly   10,000 seeds of the simulated network, and 20 kills of each kind; about half an hour
# make fuzz   1,000,000 hostile inputs; coverage guides them where atheris is installed
# POLYFED_DATA=DIR make test   also runs the tests marked real_data

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo fuzz nightly test lint types docs clean

.venv/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/.tests: .venv/.runs
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: .venv/.runs
	$(BIN)/polyfed compare local fedavg-trunk fedlinked --task digits --seeds 3

.venv/.docs: .venv/.runs
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

lint: .venv/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.tests
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2 -q

nightly: .venv/.tests
	$(BIN)/polyfed simulate --count 10000
	POLYFED_KILLS=20 $(BIN)/pytest -q -n 0 tests/engines/test_peer.py
	POLYFED_KILLS=1 $(BIN)/pytest -q -n 0 tests/engines/test_flower.py

fuzz: .venv/.tests
	$(BIN)/python tests/fuzz/run.py --inputs 1000000

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
