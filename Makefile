# make demo   three nodes with overlapping digit tasks: a table in about a minute
# make test   everything the project checks: style, types, tests
# POLYFED_DATA=DIR make test   also runs the tests marked real_data

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types clean

.venv/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/.tests: .venv/.runs
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: .venv/.runs
	$(BIN)/polyfed compare local fedavg-trunk fedlinked --task digits --seeds 3

lint: .venv/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.tests
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2 -q

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
