#!/usr/bin/env bash
# Builds the native core with the address and undefined-behaviour sanitizers in a temporary directory and runs its tests
# on that build, or `python -m experiments` with the arguments that are given. Needs GCC, cmake, ninja and the packages
# of the tests; about five minutes.
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

# PyTorch is not instrumented and never frees what it holds at exit: no leak check. The core is put in place before
# thinwire asks for it, whatever build is installed.
LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" CORE="$build/_native.abi3.so" python - "$@" <<'PYTHON'
import importlib.util
import os
import sys

import pytest

name = "thinwire.kernels._native"
spec = importlib.util.spec_from_file_location(name, os.environ["CORE"])
core = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)

from thinwire.kernels import native

assert native.CORE is core, "the tests would run on another build"
if sys.argv[1:]:
    from experiments.__main__ import main

    sys.exit(main(sys.argv[1:]))
# --capture=sys: what the sanitizers write before they end the process must not be swallowed.
tests = ["native", "adam", "factors", "floats", "norms", "rows", "sparse", "spectrum", "shared"]
# Of autograd: an exception of PyTorch's, which the sanitizers do not let pass.
which = [*(f"tests/kernels/test_kernels_{name}.py" for name in tests), "-k", "not interpreter and not forked and not faster_than and not autograd"]
which.append("tests/test_fuzz.py::test_damaged_messages_decode_inside_their_buffers")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", *which]))
PYTHON
