"""torchft's own integration tests of local SGD and DiLoCo, with thinwire's collective in place of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "torchft_own.py"
NEEDED = ("torchft", "parameterized", "pytest")

pytestmark = [
    pytest.mark.skipif(
        not all(map(find_spec, NEEDED)), reason="takes torchft and what its tests import: parameterized"
    ),
    pytest.mark.timeout(300),
]


def run(test: str, bits: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, str(SCRIPT), test, str(bits)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize(
    "test",
    [
        "test_local_sgd_recovery_0",
        "test_diloco_healthy_0",
        "test_diloco_recovery_0",
        "test_streaming_diloco_recovery_0",
    ],
)
def test_replicas_recover_and_agree(test: str) -> None:
    said = run(test, bits=4)
    tensors, num_bytes, inexact = map(int, re.findall(r"\d+", said[said.rindex("counted {") :]))
    assert tensors > 0
    assert num_bytes > 0
    assert inexact > 0, "nothing was rounded: the sums were not compressed"
