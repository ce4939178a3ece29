"""PyTorch's own tests run on thinwire's process groups, and what they send is compressed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.validation.conformance import RUNS


def test_some_of_them_run_and_their_floats_are_compressed(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's tests import it: pip install 'thinwire[conformance]'")
    settings = {"BACKEND": "gloo", "WORLD_SIZE": "2", "THINWIRE_CONFORMANCE_STATS": str(tmp_path)}
    settings["THINWIRE_CONFORMANCE_SPEC"] = RUNS["thinwire, every float"]
    lines = tmp_path / "lines"
    names = ["test_all_gather", "test_get_rank", "test_ddp_hook_parity_allreduce"]
    command = [sys.executable, "-m", "experiments.validation.suite", str(lines), *names]
    subprocess.run(command, env={**os.environ, **settings}, check=True, capture_output=True)
    rows = {row["test"]: row for row in map(json.loads, lines.read_text().splitlines())}
    assert {name: row["result"] for name, row in rows.items()} == dict.fromkeys(names, "passed")
    assert rows["test_all_gather"]["compressed"] > 0
    # Of PyTorch's own, it asks for a GPU for each rank.
    assert rows["test_ddp_hook_parity_allreduce"]["compressed"] > 0
