"""``python -m experiments bench members``: training among workers that die and come back, beside one that restarts."""

from __future__ import annotations

import json as jsons
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire import lab
from thinwire.compare.gpt import GPTConfig
from thinwire.compare.tasks import GPTTask
from thinwire.results import OutputFile, Results

WORKERS = 4
STEP_S = 0.2
EVERY = 25
JOIN_TIMEOUT_MS = 20_000
HEARTBEAT_TIMEOUT_MS = 1500
TASK = GPTTask(model=GPTConfig(width=128, layers=2), steps=2000, learning_rate=3e-3, probe_windows=128)
LEAVES = "left: its residual is dropped"
# torchft addresses its servers by host name, and in the lab names are addresses.
NAMED = ("unshare", "--uts", "sh", "-c", 'echo 10.77.0.$((RANK + 1)) > /proc/sys/kernel/hostname && exec "$@"', "sh")


@dataclass(frozen=True)
class Run:
    """What one run of the lab has left."""

    goodput: dict[str, float]
    kept: float
    """Tokens in a state that outlived their workers."""
    curve: list[tuple[float, float]]
    """Tokens kept so far by all workers, and the held-out loss of the state that has them."""
    compared: int
    """Exchanges after which two workers or more noted their weights."""
    differing: int
    """Those after which these were not the same."""
    departures: int
    """Lines of workers about others that left."""
    sent_bytes: float
    errors: str


def members(
    *,
    seconds: int = 240,
    kill_every: int = 60,
    absent: int = 30,
    modes: tuple[str, ...] = ("undisturbed", "members", "restarting"),
    json: OutputFile = None,
) -> int:
    """Train on four workers over 100 Mbit/s, one of which is killed every minute and comes back half a minute later.

    Three modes: local updates in torchft's groups, the same undisturbed, and gradients averaged in every step by a job
    that torchrun restarts from its last checkpoint. A step takes 0.2 s at least, most of it asleep, as if an
    accelerator computed it, so that four workers fit on two cores.

    Examples:
      python -m experiments bench members --json benchmarks/members.json
      python -m experiments bench members --seconds 600

    Args:
        seconds: length of each run, with the start of its processes.
        kill_every: seconds from one death to the next; workers die in turn.
        absent: seconds from a death until the worker is started again.
        modes: which of the runs.
        json: write the figures to this file; those of other modes that it holds stay.
    """
    console = Console(highlight=False)
    lab.need_network()
    results = Results("python -m experiments bench members")
    results.about = {"seconds": seconds, "kill_every_s": kill_every, "absent_s": absent, "workers": WORKERS}
    results.about |= {"step_s": STEP_S, "every": EVERY, "rate": "100mbit", "task": asdict(TASK)}
    results.about |= {"join_timeout_ms": JOIN_TIMEOUT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
    if json is not None and json.exists():
        before = jsons.loads(json.read_text())
        if before["about"] == jsons.loads(jsons.dumps(results.about)):
            results.results = [row for row in before["results"] if row["name"].split("/")[0] not in (*modes, "both")]
    kills = [1 + i % WORKERS for i in range(int((seconds - 1) // kill_every))]
    for mode in modes:
        schedule: list[str] = []
        if mode != "undisturbed":
            for i, rank in enumerate(kills, 1):
                schedule += [f"kill {rank}@{i * kill_every}s"]
                schedule += [f"join {rank}@{i * kill_every + absent}s"] if i * kill_every + absent < seconds else []
        run = _run("synchronous" if mode == "restarting" else "managed", seconds, schedule)
        if not run.curve:
            console.print(f"{mode}: nothing was kept\n{run.errors[-3000:]}")
            return 1
        _add(results, mode, run, 0 if mode == "undisturbed" else len(kills))
        _add_comparisons(results)
        console.print(_table(results))
        if json is not None:
            results.write(json)
    return 0


def _run(mode: str, seconds: int, schedule: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory(prefix="thinwire-members-") as name:
        folder = Path(name)
        (folder / "schedule").write_text("".join(f"{line}\n" for line in schedule))
        config = {"mode": mode, "folder": name, "task": asdict(TASK), "workers": WORKERS, "step_s": STEP_S}
        config |= {"every": EVERY, "join_timeout_ms": JOIN_TIMEOUT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
        # Rank 0 is a place that outlives workers; no figure counts it.
        argv = [sys.executable, "-m", "thinwire", "lab", "--ranks", str(WORKERS + 1), "--rate", "100mbit"]
        argv += ["--timeout", str(seconds), "--schedule", str(folder / "schedule"), "--json", str(folder / "lab.json")]
        argv += ["--count", r"kept (\d+) tokens"]
        argv += ["--", *NAMED, sys.executable, "-m", "experiments.bench.members_rank", jsons.dumps(config)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds + 120)
        if not (folder / "lab.json").exists():
            return Run({}, 0.0, [], 0, 0, 0, 0.0, done.stderr)
        rows = {row["name"]: row["value"] for row in jsons.loads((folder / "lab.json").read_text())["results"]}
        notes = [jsons.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in _whole_lines(path)]
    possible = TASK.batch * TASK.model.context / STEP_S
    goodput = {
        "of_all_workers": rows["counted"] / (possible * WORKERS * rows["seconds"]),
        "of_present_workers": rows["counted"] / (possible * (rows["rank_seconds"] - rows["seconds"])),
    }
    sent = sum(value for name, value in rows.items() if name.startswith("sent_bytes/") and name[-1] != "0")
    departures = len(re.findall(LEAVES, done.stderr))
    return Run(goodput, rows["counted"], *_digest(notes), departures, sent, done.stderr)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file whose writer may have been killed."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _digest(notes: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], int, int]:
    """The curve of the loss, how many exchanges were compared, and after how many weights differed."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for note in notes:
        by_step.setdefault(note["step"], []).append(note)
    curve, total, compared, differing = [], 0.0, 0, 0
    for _, group in sorted(by_step.items()):
        counted = [note for note in group if note["kept"]]
        total += sum(note["kept"] for note in counted)
        compared += len(counted) > 1
        differing += len({note["weights"] for note in counted}) > 1
        curve += [(total, note["loss"]) for note in counted if "loss" in note][:1]
    return curve, compared, differing


def _loss_at(curve: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """The held-out loss after so many tokens, between two points of the curve; None beyond its ends."""
    for (t0, loss0), (t1, loss1) in pairwise(curve):
        if t0 <= tokens <= t1 and t1 > t0:
            return loss0 + (loss1 - loss0) * (tokens - t0) / (t1 - t0)
    return None


def _add(results: Results, mode: str, run: Run, num_kills: int) -> None:
    for name, value in run.goodput.items():
        results.add(f"{mode}/goodput/{name}", value, "")
    results.add(f"{mode}/kept_tokens", run.kept, "")
    results.add(f"{mode}/loss", run.curve[-1][1], "nats/byte", tokens=run.curve[-1][0], curve=run.curve)
    results.add(f"{mode}/exchanges_compared", run.compared, "")
    results.add(f"{mode}/exchanges_differing", run.differing, "")
    results.add(f"{mode}/kills", num_kills, "")
    results.add(f"{mode}/lines_of_departure", run.departures, "")
    results.add(f"{mode}/sent_bytes_per_token", run.sent_bytes / run.kept, "B")


def _add_comparisons(results: Results) -> None:
    """Tokens kept over those of the undisturbed run, and the disturbed loss over its, at the most tokens of both."""
    kept = {row["name"].split("/")[0]: row["value"] for row in results.results if row["name"].endswith("/kept_tokens")}
    results.results = [row for row in results.results if not row["name"].endswith("/kept_of_undisturbed")]
    for mode, tokens in kept.items():
        if "undisturbed" in kept:
            results.add(f"{mode}/kept_of_undisturbed", tokens / kept["undisturbed"], "")
    curves = {row["name"].split("/")[0]: row["curve"] for row in results.results if row["name"].endswith("/loss")}
    results.results = [row for row in results.results if row["name"] != "both/loss_excess"]
    if {"undisturbed", "members"} <= set(curves):
        ends = [(tokens, loss) for tokens, loss in curves["members"] if _loss_at(curves["undisturbed"], tokens)]
        if ends:
            tokens, loss = ends[-1]
            undisturbed = _loss_at(curves["undisturbed"], tokens)
            assert undisturbed is not None
            results.add("both/loss_excess", loss / undisturbed - 1, "", tokens=tokens)


def _table(results: Results) -> Table:
    table = Table("", "goodput", "of those present", "tokens kept", "loss", "weights differ", "departures")
    for mode in dict.fromkeys(row["name"].split("/")[0] for row in results.results):
        if mode == "both":
            continue
        table.add_row(
            mode,
            f"{results.value(f'{mode}/goodput/of_all_workers'):.1%}",
            f"{results.value(f'{mode}/goodput/of_present_workers'):.1%}",
            f"{results.value(f'{mode}/kept_tokens'):,.0f}",
            f"{results.value(f'{mode}/loss'):.4f}",
            f"{results.value(f'{mode}/exchanges_differing'):.0f} of {results.value(f'{mode}/exchanges_compared'):.0f}",
            f"{results.value(f'{mode}/lines_of_departure'):.0f} lines, {results.value(f'{mode}/kills'):.0f} deaths",
        )
    excess = [row for row in results.results if row["name"] == "both/loss_excess"]
    if excess:
        table.caption = (
            f"loss of members above undisturbed at {excess[0]['tokens']:,.0f} tokens: {excess[0]['value']:+.2%}"
        )
    return table
