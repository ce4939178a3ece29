"""torchft's own integration tests of local SGD and DiLoCo, with thinwire's collective in place of its own."""

from __future__ import annotations

import json
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


def run(prefix: str, bits: int) -> dict[str, dict[str, int]]:
    """What each of torchft's tests whose names begin so has sent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, str(SCRIPT), prefix, str(bits)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return {
        name: json.loads(counts) for name, counts in re.findall(r"^passed (\w+) ({.*})$", done.stdout, re.MULTILINE)
    }


@pytest.mark.parametrize(
    ("prefix", "variants"),
    [
        ("test_local_sgd_recovery", 1),
        ("test_diloco_healthy", 1),
        ("test_diloco_recovery", 1),
        ("test_streaming_diloco_recovery", 1),
        # One or two fragments, without and with a delay, three ways to mix the mean in.
        ("test_streaming_diloco_upscale", 12),
        ("test_streaming_diloco_commit_failure", 12),
    ],
)
def test_replicas_recover_and_agree(prefix: str, variants: int) -> None:
    sent = run(prefix, bits=4)
    assert len(sent) == variants
    for name, counts in sent.items():
        assert counts["tensors"] > 0, name
        assert counts["bytes"] > 0, name
        assert counts["inexact"] > 0, f"{name}: nothing was rounded: the sums were not compressed"
