# make demo [EXTRA=cuda13|tpu]   set up, and answer a question with a drafter and without it (dflash demo)
# make test                      set up with the test extras, lint, check types, run every test
# make check-long                what takes too long for every change: the whole model in Triton's interpreter; the check of a
#                                card as far as a CPU goes; the suite without the kernels, and on one thread;
#                                the server under attack, and with agents, which pip and npm install;
#                                with LM_EVAL=PYTHON, which has lm-eval[api], lm-eval against it
PYTHON ?= python3
EXTRA ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WANTED := $(if $(EXTRA),[$(EXTRA)],)

.PHONY: demo test types pytest check-long python clean

demo: $(VENV)/.demo$(EXTRA)
	@$(BIN)/python -m dflash_jax demo

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Beside one another: basedpyright, which has one thread, writes its report at once when it ends.
	$(MAKE) --no-print-directory --jobs=2 types pytest

types: $(VENV)/.test
	$(BIN)/basedpyright

pytest: $(VENV)/.test
	$(BIN)/python -m pytest -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist loadfile --no-loadscope-reorder

check-long: $(VENV)/.test
	$(BIN)/python -m pytest -m long
	rm -rf .cache/card-check
	$(BIN)/python scripts/card/check.py --platform cpu --minutes 10 --out .cache/card-check
	CXX=/bin/false DFLASH_LOAD=400 $(BIN)/python -m pytest -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 DFLASH_LOAD=400 taskset -c 0 $(BIN)/python -m pytest -p no:xdist
	$(BIN)/python scripts/server/attack.py --markdown benchmarks/attack.md
	$(BIN)/python scripts/clients/check.py --markdown benchmarks/clients.md
	$(if $(LM_EVAL),$(BIN)/python scripts/others/check_lm_eval.py --lm-eval-python $(LM_EVAL))

python:
	$(if $(shell command -v $(PYTHON)),,$(error $(PYTHON) is not there: Python 3.11 or later is needed (make PYTHON=...)))
	$(if $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11) or "")'),,\
	  $(error $(shell $(PYTHON) --version) is too old: Python 3.11 or later is needed (make PYTHON=python3.12 ...)))
	@:

$(VENV)/bin/python: | python
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo$(EXTRA): pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) -e ".$(WANTED)"
	touch $@

# torch first and alone: it serves the parity tests only, and the one version named there has a CPU build.
$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) torch==2.13.0
	$(PIP) -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
