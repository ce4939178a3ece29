"""``tools/first_gpu.py``: a stage may fail or hang, and its log may end anywhere; all of it runs without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import first_gpu
import pytest
from first_gpu import Stage

ROOT = Path(__file__).parents[2]
PYTHON, WHEELS = (os.environ.get(f"THINWIRE_REHEARSAL_{name}", "") for name in ("PYTHON", "WHEELS"))

LOG = """
tests/kernels/test_triton.py::test_a[maxabs-2 | x] PASSED [  5%]
tests/kernels/test_triton.py::test_b SKIPPED (needs a GPU) [ 10%]
[gw3] [ 15%] FAILED tests/kernels/test_cuda.py::test_c[ef(topk(density=0.1))]
[gw0] [ 20%] PASSED tests/kernels/test_cuda.py::test_d
tests/kernels/test_cuda.py::test_e \
"""


def test_a_log_is_read_wherever_it_ends() -> None:
    failed = "tests/kernels/test_cuda.py::test_c[ef(topk(density=0.1))]"
    assert first_gpu.read(LOG) == ({"passed": 2, "failed": 1, "skipped": 1}, failed)
    assert first_gpu.read(LOG + "\nE   RuntimeError: no") == (first_gpu.read(LOG)[0], f"{failed} RuntimeError: no")
    assert first_gpu.read("Traceback:\ntorch.OutOfMemoryError: much\n") == ({}, "torch.OutOfMemoryError: much")


def test_a_stage_that_hangs_is_cut_and_the_next_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    finish = first_gpu.finish

    def instead(command: list[str], log, deadline: float, rehearse: bool) -> int:
        said = "import time; print('begins', flush=True); time.sleep(60)" if "speed" in command else "print('fine')"
        return finish([sys.executable, "-c", said], log, min(deadline, time.monotonic() + 2.0), rehearse)

    monkeypatch.setattr(first_gpu, "finish", instead)
    monkeypatch.setattr(first_gpu, "STAGES", (Stage("speed", "", "speed"), Stage("train", "", "train")))
    assert first_gpu.main(["--json", str(tmp_path / "all.json"), "--folder", str(tmp_path)]) == 1
    stages = json.loads((tmp_path / "all.json").read_text())["stages"]
    assert [stage["ok"] for stage in stages] == [False, True]
    assert "first failure: speed: cut at its limit of time, after: begins" in capsys.readouterr().out
    assert json.loads((tmp_path / "speed.json").read_text()) == stages[0]


def test_without_a_gpu_it_says_so_and_stops(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/first_gpu.py"), "--json", str(tmp_path / "all.json")]
    there = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--folder", str(tmp_path)], env=there, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exit code 42, after: This PyTorch" in done.stdout
    assert "speed" not in done.stdout


def test_gaps_and_overlap_of_a_step() -> None:
    def kernel(stream: int, ts: float, dur: float) -> dict:
        return {"cat": "kernel", "tid": stream, "ts": ts, "dur": dur, "args": {"stream": stream}, "name": "k"}

    events = [kernel(7, 0, 100), kernel(7, 130, 70), kernel(20, 90, 50), {"cat": "cpu_op", "tid": 1, "ts": 0, "dur": 9}]
    events.append({"cat": "gpu_user_annotation", "name": "thinwire encode", "tid": 20, "ts": 90, "dur": 50})
    found = first_gpu.timeline(events, ("kernel",))
    assert found["launches"] == 3
    assert found["stages_ms"] == {"thinwire encode (device)": 0.05}
    parts = {"span_ms": 0.2, "busy_ms": 0.2, "gaps_ms": 0, "other_streams_ms": 0.05, "overlap_ms": 0.02}
    assert {name: found[name] for name in parts} == pytest.approx(parts)


@pytest.mark.skipif(not PYTHON or not WHEELS, reason="THINWIRE_REHEARSAL_PYTHON and _WHEELS are not set: docs/gpu.md")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="takes unshare of util-linux")
@pytest.mark.timeout(1800)
def test_rehearsal_without_network(tmp_path: Path) -> None:
    offline = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    options = f"CUDA_ARGS=--rehearse --json {tmp_path}/all.json --folder {tmp_path}"
    done = subprocess.run([*offline, "make", "cuda", f"PYTHON={PYTHON}", f"WHEELS={WHEELS}", options], cwd=ROOT)
    assert done.returncode == 0
    stages = json.loads((tmp_path / "all.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == [stage.name for stage in first_gpu.STAGES]
    assert all(stage["figures"] or stage["tests"] for stage in stages)
