# `make demo` and `make test` need Python 3.11, 3.12 or 3.13: they make their own environment in .venv, again whenever a
# file that says what is in it changes. A C++ compiler builds the native part; `make test` tests that and so needs one.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUNTIME := $(VENV)/.runtime-installed
TESTING := $(VENV)/.testing-installed

.DELETE_ON_ERROR:
.PHONY: demo test check clean

demo: $(RUNTIME)
	$(VENV)/bin/dtorch run sd3 --prompt "a cat" --out cat.png

# Two processes, each with the tests of whole files: a file's tests share a session.
test: check
	$(VENV)/bin/pytest -q -n 2 --dist loadfile

check: $(TESTING)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis cat.png
	rm -f dtorch/native/_ext-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and exactly: the native part is compiled against it, which is why dtorch's own build is not isolated,
# and a looser range would let pip bring a newer one. setuptools, which builds dtorch, comes with it.
$(RUNTIME): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	{ echo "dtorch needs Python 3.11 to 3.13, and $(PYTHON) is not one; name one: make PYTHON=python3.12"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)" setuptools
	$(PIP) install -q -c constraints.txt --no-build-isolation -e .
	touch $@

$(TESTING): $(RUNTIME)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test]'
	touch $@
