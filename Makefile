# Two commands for a newcomer: `make demo` and `make test`. Each makes its own environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard native/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: demo test test-slow test-all check format sanitize fuzz fuzz-sanitized chaos soak mutants conformance versions triton cuda cuda-wheels bench experiments experiments-smoke readme docs wheel wheel-check first-answer address clean

demo: .venv/demo
	$(BIN)/thinwire demo

# Hundreds of processes import the tests and what they test: they are compiled once. Three tests at a time keep two cores
# busy, as some wait. A worker that is lost is not replaced: pytest-xdist then waits for ever for tests that no worker has.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
WORKERS := -n 3 --dist worksteal --max-worker-restart 0

# Under four minutes on two cores, with tests of every part.
test: .venv/ready
	$(PYTEST) -m "alone and not slow and not smoke"
	$(PYTEST) $(WORKERS) -m "not slow and not smoke and not alone"

# The rest: whole trainings, killed ranks, emulated networks, small versions of the experiments.
test-slow: .venv/ready
	$(PYTEST) $(WORKERS) -m "slow and not alone"
	$(PYTEST) -m "alone and slow"

test-all: test test-slow

check: .venv/ready
	$(BIN)/ruff check src experiments tests tools examples
	$(BIN)/ruff format --check src experiments tests tools examples
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tools/voice.py

format: .venv/ready
	$(BIN)/ruff check --fix src experiments tests tools examples
	$(BIN)/ruff format src experiments tests tools examples

# The native core under the address and undefined-behavior sanitizers.
sanitize: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" bash native/sanitize.sh

# Fuzzing for longer than the tests do: about ten minutes.
fuzz: .venv/ready
	THINWIRE_FUZZ=30 $(BIN)/python -m pytest --timeout 3600 tests/test_fuzz.py tests/test_fuzz_files.py

# Ten million damaged messages under the sanitizers: about fifteen minutes of processor time.
fuzz-sanitized: .venv/ready
	for seed in 0 1; do PATH="$(CURDIR)/$(BIN):$$PATH" bash native/sanitize.sh fuzz --inputs 5000000 --seed $$seed \
	  --json benchmarks/validation/fuzz-$$seed.json || exit 1; done

# Faults seeded into the source, each of which a test that is named for it must find. Ten minutes; changes files in place.
mutants: .venv/ready
	$(BIN)/python tools/mutants.py --json benchmarks/validation/mutants.json

# PyTorch's own tests of process groups, on gloo and on thinwire: half an hour.
conformance: .venv/ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check expecttest
	$(BIN)/python -m experiments conformance --folder build/conformance --json benchmarks/validation/conformance.json

# The fast tests of what attaches, with the oldest PyTorch, later ones and the newest, and with other versions of Python:
# a quarter of an hour and, with builds for CPUs, a gigabyte for each. Writes the table in docs/trainers.md.
versions: .venv/ready
	PYTHONPATH=. $(BIN)/python tools/versions.py

# A thousand ranks that fail in seeded ways, with stock DDP beside them: which errors the others get, and when. Hours.
chaos: .venv/ready
	$(BIN)/python -m experiments chaos --faults 1000 --jobs 6 --folder build/chaos --json benchmarks/validation/chaos.json

# 100 000 steps of four ranks: memory, threads, files and replicas.
soak: .venv/ready
	$(BIN)/python -m experiments soak --json benchmarks/validation/soak.json

# The GPU kernels in Triton's interpreter, then compiled. Triton alone (no dependencies) leaves the PyTorch that is there
# untouched.
triton: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0
	TRITON_INTERPRET=1 $(PYTEST) $(WORKERS) tests/kernels/test_triton*.py
	$(PYTEST) $(WORKERS) tests/kernels/test_triton*.py

# What needs a GPU, in stages by their worth and within nine minutes: tests, speed, a training, a profile. With WHEELS,
# a folder that `make cuda-wheels` has filled, it takes the PyTorch and Triton that PYTHON has, and no network.
ifdef WHEELS
CUDA := .venv-cuda
else
CUDA := .venv
endif
cuda: $(CUDA)/ready
	$(CUDA)/bin/python tools/first_gpu.py --json benchmarks/speed/cuda.json $(CUDA_ARGS)

# What a Python that has PyTorch may lack, as wheels of pure Python.
cuda-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest $(or $(WHEELS),.whl) --constraint constraints.txt \
	  tyro docstring_parser typeguard rich markdown-it-py mdurl pygments typing_extensions \
	  scikit-build-core pathspec packaging pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers

# Site packages of PYTHON, which may be an environment itself, by name; its pip, as a system's Python may lack one to give.
.venv-cuda/ready: $(SOURCES)
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv --without-pip .venv-cuda
	$(PYTHON) -c 'import site; print("import site;", *(f"site.addsitedir({p!r});" for p in [*site.getsitepackages(), site.getusersitepackages()]))' \
	  > `.venv-cuda/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/of-python.pth
	$(PYTHON) -m pip --python .venv-cuda/bin/python install --quiet --no-index --find-links $(WHEELS) \
	  tyro rich scikit-build-core pytest pytest-timeout hypothesis
	$(PYTHON) -m pip --python .venv-cuda/bin/python install --quiet --no-index --no-deps --no-build-isolation \
	  --config-settings build-dir=build/cuda --editable .
	touch $@

# Benchmarks of speed, for the figures of README.md and docs/. Those of trainings are named where their figures stand.
bench: .venv/ready
	$(BIN)/thinwire bench kernels --threads 1 --json benchmarks/speed/kernels-1.json
	$(BIN)/thinwire bench kernels --threads 2 --json benchmarks/speed/kernels-2.json
	$(BIN)/python -m experiments bench algorithms --json benchmarks/speed/algorithms.json
	$(BIN)/thinwire bench allreduce --ranks 4 --rate 1gbit --rtt 20ms --size-mb 0.1 --repeats 9 \
	  --algorithm sra ring tree allgather parameter_server --json benchmarks/speed/allreduce-small.json
	$(BIN)/thinwire bench allreduce --ranks 4 --rate 1gbit --rtt 20ms --size-mb 25 --repeats 9 \
	  --algorithm sra ring tree allgather parameter_server --json benchmarks/speed/allreduce-long.json
	$(BIN)/python -m experiments bench instrument --json benchmarks/results/instrument.json
	$(BIN)/python -m experiments bench optimizer --json benchmarks/optimizer/optimizer.json
	$(BIN)/thinwire bench step --rate 1gbit --json benchmarks/speed/step-1gbit.json
	$(BIN)/thinwire bench step --rate none --skip-if-slower --target 0 --batches 8 --json benchmarks/speed/step-loopback.json
	$(BIN)/python -m experiments bench doctor --json benchmarks/doctor/doctor.json
	$(BIN)/python -m experiments bench doctor --sharded --rounds 4 --json benchmarks/doctor/doctor-fsdp.json
	$(BIN)/python -m experiments bench compressors --json benchmarks/compressors/compressors.json --plot benchmarks/compressors/compressors.svg
	$(BIN)/thinwire compare every --json benchmarks/compressors/compare-every.json
	$(BIN)/thinwire demo --out benchmarks/demo --json benchmarks/demo/demo.json

# Every experiment of the papers, about two and a half hours on two quiet cores, and a page of all claims.
experiments: .venv/ready
	$(BIN)/python -m experiments all --out benchmarks

# The small version of each: the same path, no figures worth keeping. Ten minutes.
experiments-smoke: .venv/ready
	$(PYTEST) $(WORKERS) -m "smoke or slow" tests/experiments

# The figures of README.md and docs/, from the JSON files that `make bench` and `make experiments` wrote.
readme: .venv/ready
	$(BIN)/python -m experiments.framework.pages

# The documentation, strictly: a link or an anchor that leads nowhere is an error. Open build/site/index.html.
docs: .venv/ready
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

# Puts the repository's ADDRESS in place of the placeholder, wherever that is named.
address:
	sed -i "s#https://example.org/thinwire#$(ADDRESS)#g" pyproject.toml README.md docs/index.md

clean:
	rm -rf .venv .venv-cuda build demo dist

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
