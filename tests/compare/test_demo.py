"""``thinwire demo``: the whole path in its small version, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from aggregation import wait_until
from commands import shown_by
from thinwire_tools import lab
from thinwire_tools.compare import command, demo as demo_module
from thinwire_tools.compare.paired import Rank
from thinwire_tools.compare.variants import VARIANTS, Variant
from thinwire_tools.lab import Loopback
from thinwire_tools.ranks import RankFailedError, RankProcesses

SMOKE = demo_module.SMOKE
UNAVAILABLE = lab.unavailable()


def _values(path: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}


@pytest.mark.network
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_all_variants_are_measured_and_bytes_are_those_of_the_formulas(tmp_path: Path) -> None:
    shown_by(["demo", "--smoke", "--out", str(tmp_path), "--json", str(tmp_path / "f.json")])
    record, figures = json.loads((tmp_path / "f.json").read_text()), _values(tmp_path / "f.json")
    about = record["about"]
    assert "failures" not in about
    for name in VARIANTS:
        assert (f"steps_per_s/{name}" in figures) == VARIANTS[name].on_link
        assert 3 < figures[f"val_loss/{name}"] < 5.6
    assert figures["val_loss/control"] > figures["val_loss/fp32"]
    curves = {row["name"]: row["probes"] for row in record["results"] if "probes" in row}
    assert len({curve["losses"][0] for curve in curves.values()}) == 1
    assert all(curve["losses"] == sorted(curve["losses"], reverse=True) for curve in curves.values())
    assert about["link"]["rate_bps"] == [100_000_000] * 2
    dense = 4 * about["parameters"] * SMOKE.steps
    assert figures["payload_bytes/fp32"] == 2 * figures["payload_bytes/bf16"] == dense
    assert figures["payload_bytes/alone"] == 0
    # Two dense steps come first, then factors of rank 4.
    assert 2 / SMOKE.steps < figures["payload_bytes/powersgd"] / dense < 4 / SMOKE.steps
    # The interface adds headers and acknowledgements: 3 to 12 % with messages this small.
    for name in ("fp32", "bf16", "powersgd", "thinwire"):
        assert 1.03 < figures[f"wire_bytes/{name}"] / figures[f"payload_bytes/{name}"] < 1.2
    assert figures["wire_bytes/alone"] < 0.01 * figures["wire_bytes/fp32"]
    assert figures["interface_ratio"] == pytest.approx(figures["formula_ratio"], rel=0.1)
    assert [check["outcome"] for check in about["checks"]] == ["shown", "shown"]
    if find_spec("matplotlib"):
        assert VARIANTS["thinwire"].title in (tmp_path / "loss.svg").read_text()


def _ignore(*_: Any) -> None:
    pass


def _run(ranks: RankProcesses, variant: Variant, on_event: Callable[..., None] = _ignore) -> list[dict[str, Any]]:
    ranks.run(Rank.begin, {"variant": variant, "seed": 0, "measure": 0})
    ranks.run(Rank.train, {"until": SMOKE.steps}, on_event)
    return ranks.run(Rank.finish, {})


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankProcesses]:
    make = partial(Rank, task=SMOKE)
    with RankProcesses(Loopback(2), make, 2, folder=tmp_path, name="ranks", timeout_s=40) as ranks:
        yield ranks


def test_runs_are_the_same_to_the_bit_until_a_rank_is_killed(ranks: RankProcesses) -> None:
    names = ("thinwire", "thinwire", "fp32", "alone")
    digests = [[answer["digest"] for answer in _run(ranks, VARIANTS[name])] for name in names]
    assert digests[0] == digests[1] != digests[2]
    assert len(set(digests[0])) == len(set(digests[2])) == 1
    assert len(set(digests[3])) == 2

    def kill(rank: int, event: dict[str, Any]) -> None:
        if event["step"] == 3:
            ranks.process(1).kill()

    started = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1: ended by signal 9") as failed:
        _run(ranks, VARIANTS["thinwire"], kill)
    assert failed.value.rank == 1
    assert time.monotonic() - started < 35


def test_a_rank_that_raises_is_reported_with_its_words_and_its_log(ranks: RankProcesses) -> None:
    with pytest.raises(RankFailedError, match="no compressor is called 'nosuch'") as failed:
        _run(ranks, Variant("nosuch"))
    assert "ddp.py" in failed.value.log


def test_a_silent_rank_is_an_error(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.silence_s = 1.0

    def stop(rank: int, event: dict[str, Any]) -> None:
        ranks.process(1).send_signal(signal.SIGSTOP)

    with pytest.raises(RankFailedError, match=r"rank [01]: sent nothing for 1 s"):
        _run(ranks, VARIANTS["bf16"], stop)


def test_over_loopback_time_is_not_compared_and_the_demo_goes_on_after_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of two variants die: two rows say so, and everything else is measured."""
    run = RankProcesses.run

    def run_and_kill(ranks: RankProcesses, function: Any, arguments: Any, *args: Any) -> list[dict[str, Any]]:
        if function is Rank.begin and arguments["variant"].spec in ("torch-powersgd", "bf16"):
            ranks.process(0).kill()
        return run(ranks, function, arguments, *args)

    monkeypatch.setattr(RankProcesses, "run", run_and_kill)
    monkeypatch.setattr(command.lab, "unavailable", lambda: "no [right] to make namespaces")
    assert command.demo(smoke=True, out=tmp_path, seed=3) == 1
    record, figures = json.loads((tmp_path / "demo.json").read_text()), _values(tmp_path / "demo.json")
    assert set(record["about"]["failures"]) == {"powersgd", "bf16"}
    assert {"val_loss/fp32", "val_loss/thinwire", "val_loss/control"} <= set(figures)
    assert not [name for name in figures if name.startswith(("steps_per_s", "wire_bytes", "speedup", "seconds"))]
    assert figures["payload_bytes/fp32"] / figures["payload_bytes/thinwire"] > 5
    assert figures["val_loss/thinwire"] == pytest.approx(figures["val_loss/fp32"], rel=0.01)
    assert not (tmp_path / "loss.svg").exists()
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "no [right] to make namespaces" in text
    assert "rank 0: ended by signal 9" in text


def _ranks_of(folder: Path) -> list[int]:
    """Rank processes whose scratch is in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0")
            forked = b"forkserver" in (process / "cmdline").read_bytes()
            # The server that they are forked off has no session of its own.
            if ours and forked and os.getsid(int(process.name)) == int(process.name):
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    argv = [sys.executable, "-m", "thinwire", "demo", "--smoke", "--steps", "2000", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("DDP fp32: ") for line in demo.stdout)
        assert len(_ranks_of(scratch)) >= 2
        os.killpg(demo.pid, signal.SIGINT)
        demo.stdout.read()
        assert demo.wait(100) == 130
    wait_until(lambda: not _ranks_of(scratch))
    assert list(scratch.glob("thinwire-*")) == []
