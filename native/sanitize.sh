#!/usr/bin/env bash
# Builds the native core with the address and undefined-behavior sanitizers in a temporary directory and runs its tests
# on that build, or `python -m experiments` with the arguments that are given. Needs GCC, cmake, ninja and the packages
# of the tests; under three minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

runtime=$("${CXX:-g++}" -print-file-name=libasan.so)
if [[ "$runtime" != /* ]]; then
  echo "${CXX:-g++} has no libasan: install GCC's sanitizer libraries, or name another GCC with CXX=" >&2
  exit 1
fi

CXX="${CXX:-g++}" cmake -S . -B "$build" -G Ninja -DTHINWIRE_SANITIZE=ON \
  -DPython_EXECUTABLE="$(command -v python)" >"$build/log"
cmake --build "$build" >>"$build/log" || { cat "$build/log" >&2; exit 1; }

# The core is put in place before thinwire asks for it, whatever build is installed; also in the workers of pytest-xdist.
cat >"$build/sanitized.py" <<'PYTHON'
import importlib.util
import os
import sys

name = "thinwire.kernels._native"
spec = importlib.util.spec_from_file_location(name, os.environ["CORE"])
core = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)

from thinwire.kernels import native

assert native.CORE is core, "the tests would run on another build"
PYTHON

# PyTorch is not instrumented and never frees what it holds at exit: no leak check.
export LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$build:src:.${PYTHONPATH:+:$PYTHONPATH}" CORE="$build/_native.abi3.so"
if (( $# )); then
  python -c 'import sys, sanitized; from experiments.__main__ import main; sys.exit(main(sys.argv[1:]))' "$@"
  exit
fi

# --capture=sys: what the sanitizers write before they end the process must not be swallowed. Of autograd: an exception of
# PyTorch's, which the sanitizers do not let pass.
tests=()
for name in native adam factors floats norms rows sparse spectrum shared; do
  tests+=("tests/kernels/test_kernels_$name.py")
done
python -m pytest -q -p sanitized -p no:cacheprovider --capture=sys -n 2 --dist worksteal --max-worker-restart 0 \
  "${tests[@]}" tests/test_fuzz.py -k "not forked and not autograd and (test_kernels or damaged_messages)"
