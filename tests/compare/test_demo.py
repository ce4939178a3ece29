"""``thinwire demo``: the whole path in its small version, and what happens when something goes wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import shown_by
from thinwire_tools import lab
from thinwire_tools.cli import main
from thinwire_tools.compare import command, demo as demo_module, paired, rank_processes
from thinwire_tools.compare.paired import Setup
from thinwire_tools.compare.rank_processes import RankFailed, RankProcesses
from thinwire_tools.compare.tasks import describe
from thinwire_tools.compare.variants import VARIANTS, Variant
from thinwire_tools.lab import Loopback

SMOKE = demo_module.SMOKE
UNAVAILABLE = lab.unavailable()


def _values(path: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}


@dataclasses.dataclass
class Smoke:
    text: str
    figures: dict[str, float]
    record: dict[str, Any]
    out: Path


@pytest.fixture(scope="module")
def on_a_slow_link(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """One small demo at 100 Mbit/s."""
    if UNAVAILABLE:
        pytest.skip(UNAVAILABLE)
    out = tmp_path_factory.mktemp("demo")
    text = shown_by(["demo", "--smoke", "--out", str(out), "--json", str(out / "f.json")])
    return Smoke(text, _values(out / "f.json"), json.loads((out / "f.json").read_text()), out)


@pytest.mark.network
def test_all_variants_are_measured_and_bytes_are_those_of_the_formulas(on_a_slow_link: Smoke) -> None:
    figures = on_a_slow_link.figures
    assert "failures" not in on_a_slow_link.record["about"]
    for name in demo_module.ORDER:
        assert (f"steps_per_s/{name}" in figures) == VARIANTS[name].on_link
        assert 3 < figures[f"val_loss/{name}"] < 5.6
    assert figures["val_loss/control"] > figures["val_loss/fp32"]
    curves = {row["name"]: row["probes"] for row in on_a_slow_link.record["results"] if "probes" in row}
    assert len({curve["losses"][0] for curve in curves.values()}) == 1
    assert all(curve["losses"] == sorted(curve["losses"], reverse=True) for curve in curves.values())
    assert on_a_slow_link.record["about"]["link"]["rate_bps"] == [100_000_000] * 2
    about = on_a_slow_link.record["about"]
    dense = 4 * about["parameters"] * SMOKE.steps
    assert figures["payload_bytes/fp32"] == dense
    assert figures["payload_bytes/bf16"] == dense / 2
    assert figures["payload_bytes/alone"] == 0
    # Two dense steps come first, then factors of rank 4.
    assert 2 / SMOKE.steps < figures["payload_bytes/powersgd"] / dense < 4 / SMOKE.steps
    # The interface adds headers and acknowledgements: 3 to 12 % with messages this small.
    for name in ("fp32", "bf16", "powersgd", "thinwire"):
        assert 1.03 < figures[f"wire_bytes/{name}"] / figures[f"payload_bytes/{name}"] < 1.2
    assert figures["wire_bytes/alone"] < 0.01 * figures["wire_bytes/fp32"]
    assert figures["interface_ratio"] == pytest.approx(figures["formula_ratio"], rel=0.1)
    checks = {check["text"]: check["outcome"] for check in about["checks"]}
    assert list(checks.values()) == ["shown", "shown"]
    assert checks["ranks end with the same parameters, bit for bit"] == "shown"


@pytest.mark.network
def test_results_show_as_they_come_then_in_a_table_and_a_picture(on_a_slow_link: Smoke) -> None:
    lines = on_a_slow_link.text.splitlines()
    first = [
        next(i for i, line in enumerate(lines) if line.startswith(f"{VARIANTS[name].title}: 4 steps"))
        for name in demo_module.ORDER
    ]
    last = [
        next(i for i, line in enumerate(lines) if line.startswith(f"{VARIANTS[name].title}: 8 steps"))
        for name in demo_module.ORDER
    ]
    assert max(first) < min(last)
    figures, text = on_a_slow_link.figures, on_a_slow_link.text
    table = text[text.index("variant  ") : text.index("Held-out loss:")]
    rows = {name: table.index(f"\n{VARIANTS[name].title} ") for name in demo_module.ORDER}
    varied = [name for name in demo_module.ORDER if name not in ("fp32", "control")]
    assert rows["fp32"] < min(rows[name] for name in varied)
    reached = [name for name in varied if f"seconds_to_same_loss/{name}" in figures]
    by_time = sorted(reached, key=lambda name: figures[f"seconds_to_same_loss/{name}"])
    assert by_time == sorted(reached, key=lambda name: rows[name])
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "…" not in table
    pytest.importorskip("matplotlib")
    picture = (on_a_slow_link.out / "loss.svg").read_text()
    assert picture.startswith("<?xml")
    for name in demo_module.ORDER:
        assert (f"<!-- {VARIANTS[name].title} -->" in picture) == VARIANTS[name].on_link


def _ignore(*_: Any) -> None:
    pass


def _run(ranks: RankProcesses, variant: Variant, on_event: Callable[..., None] = _ignore) -> list[dict[str, Any]]:
    asked = {"variant": dataclasses.asdict(variant), "seed": 0, "measure": 0}
    ranks.run({"do": "begin", **asked})
    ranks.run({"do": "train", "until": SMOKE.steps}, on_event)
    return ranks.run({"do": "finish"})


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankProcesses]:
    setup = Setup(**describe(SMOKE))
    with RankProcesses(Loopback(2), setup, 2, folder=tmp_path, name="ranks", timeout_s=40) as ranks:
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
    with pytest.raises(RankFailed, match="rank 1: ended by signal 9") as failed:
        _run(ranks, VARIANTS["thinwire"], kill)
    assert failed.value.rank == 1
    assert time.monotonic() - started < 35


def test_a_rank_that_raises_is_reported_with_its_words_and_its_log(ranks: RankProcesses) -> None:
    with pytest.raises(RankFailed, match="no compressor is called 'nosuch'") as failed:
        _run(ranks, Variant("nosuch"))
    assert "ddp.py" in failed.value.log


def test_what_others_tell_after_a_rank_has_ended_is_heard(tmp_path: Path) -> None:
    told = []
    options: dict[str, Any] = {"folder": tmp_path, "name": "ranks", "timeout_s": 40, "module": "early_exit_rank"}
    ended = pytest.raises(RankFailed, match="rank 0: it ended")
    with RankProcesses(Loopback(3), None, 3, **options) as ranks, ended:
        ranks.run({"do": "go on"}, lambda rank, event: told.append((rank, event["step"])))
    assert sorted(told) == [(1, 1), (2, 2)]


def test_a_silent_rank_is_an_error(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.timeout_s = 0.5

    def stop(rank: int, event: dict[str, Any]) -> None:
        ranks.process(1).send_signal(signal.SIGSTOP)

    with pytest.raises(RankFailed, match=r"rank [01]: sent nothing for 1 s"):
        _run(ranks, VARIANTS["bf16"], stop)


def test_over_loopback_time_is_not_compared_and_the_demo_goes_on_after_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of two variants die: two rows say so, and everything else is measured."""
    run = RankProcesses.run

    def run_and_kill(ranks: RankProcesses, command: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
        if command.get("variant", {}).get("spec") in ("torch-powersgd", "bf16"):
            ranks.process(0).kill()
        return run(ranks, command, *args)

    monkeypatch.setattr(rank_processes.RankProcesses, "run", run_and_kill)
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
    assert "about bytes and loss only" in text
    assert "torch PowerSGD: failed: rank 0" in text
    assert "rank 0: ended by signal 9" in text
    assert "not the result that it should be" in text


def test_without_fp32_there_is_nothing_to_compare_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = RankFailed(1, "ended by signal 6", "the last words")
    monkeypatch.setattr(paired, "train_in_turns", lambda *_, **__: ({}, {"fp32": failed}))
    assert main(["demo", "--smoke", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "rank 1: ended by signal 6\nthe last words" in printed.err
    assert "What this shows" not in printed.out


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


def _until(condition: Callable[[], bool], timeout_s: float = 40.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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
    assert _until(lambda: not _ranks_of(scratch))
    assert list(scratch.glob("thinwire-*")) == []
