# Two commands for a stranger: `make demo` and `make test`. Each makes its own environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard native/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: demo test check format sanitize fuzz triton cuda bench readme docs wheel wheel-check first-answer clean

demo: .venv/demo
	$(BIN)/thinwire demo

# A worker that is lost is not replaced: pytest-xdist then waits for ever for files that no worker has.
test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not alone"
	$(BIN)/python -m pytest -m alone

check: .venv/ready
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: .venv/ready
	$(BIN)/ruff check --fix src tests tools examples
	$(BIN)/ruff format src tests tools examples

# The native core under the address and undefined-behaviour sanitizers.
sanitize: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" bash native/sanitize.sh

# Fuzzing for longer than the tests do: about ten minutes.
fuzz: .venv/ready
	THINWIRE_FUZZ=30 $(BIN)/python -m pytest --timeout 3600 tests/test_fuzz.py tests/test_fuzz_files.py

# The GPU kernels in Triton's interpreter. Triton alone (no dependencies) leaves the PyTorch that is there untouched.
triton: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0
	THINWIRE_INTERPRETER=1 $(BIN)/python -m pytest tests/test_triton*.py

# What needs a GPU: its tests, across several if there are, and its figures.
cuda: .venv/ready
	$(BIN)/python -m pytest tests/test_cuda.py tests/test_triton*.py
	$(BIN)/thinwire bench cuda --json benchmarks/cuda.json

bench: .venv/ready
	mkdir -p benchmarks
	$(BIN)/thinwire bench kernels --threads 1 --json benchmarks/kernels-1.json
	$(BIN)/thinwire bench kernels --threads 2 --json benchmarks/kernels-2.json
	$(BIN)/thinwire bench topologies --json benchmarks/topologies.json
	$(BIN)/thinwire bench blob --json benchmarks/blob.json
	$(BIN)/thinwire bench step --rate 1gbit --json benchmarks/step-1gbit.json
	$(BIN)/thinwire bench step --rate none --decline --target 0 --batches 8 --json benchmarks/step-loopback.json
	$(BIN)/thinwire bench doctor --json benchmarks/doctor.json
	$(BIN)/thinwire bench doctor --sharded --rounds 4 --json benchmarks/doctor-fsdp.json
	$(BIN)/thinwire bench auto --json benchmarks/auto.json
	$(BIN)/thinwire bench compressors --json benchmarks/compressors.json --plot benchmarks/compressors.svg
	$(BIN)/thinwire compare every --json benchmarks/compare-every.json
	$(BIN)/thinwire repro fft --out benchmarks/repro-fft --json benchmarks/repro-fft.json
	$(BIN)/thinwire repro cgx --out benchmarks/repro-cgx --json benchmarks/repro-cgx.json
	$(BIN)/thinwire repro intsgd --out benchmarks/repro-intsgd --json benchmarks/repro-intsgd.json
	$(BIN)/thinwire repro lgreco --out benchmarks/repro-lgreco --json benchmarks/repro-lgreco.json
	$(BIN)/thinwire repro qsdp --out benchmarks/repro-qsdp --json benchmarks/repro-qsdp.json
	$(BIN)/thinwire repro aqsgd --out benchmarks/repro-aqsgd --json benchmarks/repro-aqsgd.json
	$(BIN)/thinwire repro fullstack --out benchmarks/repro-fullstack --json benchmarks/repro-fullstack.json
	$(BIN)/thinwire demo --out benchmarks/demo --json benchmarks/demo.json

# The figures of README.md and docs/, from the JSON files that `make bench` wrote.
readme: .venv/ready
	$(BIN)/python tools/readme.py

# The documentation, strictly: a link or an anchor that leads nowhere is an error. Open build/site/index.html.
docs: .venv/ready
	$(BIN)/python tools/journey.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# An sdist, and from it a wheel for every Python from 3.11 on, in dist/.
wheel: .venv/ready
	$(BIN)/python tools/build_wheel.py

# The same, installed in an empty environment where no compiler is, and trained with.
wheel-check: .venv/ready
	$(BIN)/python tools/build_wheel.py --check

# From an empty folder to doctor's answer about a script: under ten minutes, or it is an error.
first-answer: .venv/ready
	$(BIN)/python tools/first_answer.py --json build/first-answer.json

clean:
	rm -rf .venv build demo dist

# torch goes in first and by name: a range, here or in a dependency, could pull another build over it. The demo waits for
# no more than it needs.
.venv/demo: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "thinwire needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making the environment in .venv (PyTorch first; this takes a minute or two) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plot]'
	touch $@

.venv/ready: .venv/demo
	@echo "Adding what tests, figures and the documentation need ..."
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[dev,docs,plot,compare,repro,trainers]'
	touch $@
