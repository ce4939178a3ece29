"""``python -m experiments bench members``: training among workers that die and come back, beside one that restarts."""

from __future__ import annotations

import json as jsons
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.framework.pages import show
from thinwire_tools import lab
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.results import OutputFile, Results

WORKERS = 4
STEP_S = 0.2
EVERY = 25
JOIN_TIMEOUT_MS = 20_000
HEARTBEAT_TIMEOUT_MS = 1500
MODES = ("undisturbed", "members", "every-step", "restarting")
TASK = GPTTask(model=GPTConfig(width=128, layers=2), steps=2000, learning_rate=3e-3, probe_windows=128)
LEAVES = "left: its residual is dropped"
# torchft addresses its servers by host name, and in the lab names are addresses.
NAMED = ("unshare", "--uts", "sh", "-c", 'echo 10.77.0.$((RANK + 1)) > /proc/sys/kernel/hostname && exec "$@"', "sh")


@dataclass(frozen=True)
class Run:
    """What one run of the lab has left."""

    goodput: dict[str, float]
    shares: dict[str, float]
    """What workers did while they were there, as shares of that time."""
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
    seed: int = 0,
    modes: tuple[str, ...] = MODES,
    json: OutputFile = None,
) -> int:
    """Train on four workers over 100 Mbit/s, one of which is killed every minute and comes back half a minute later.

    Four modes: local updates in torchft's groups ("members"), the same undisturbed, the same with an exchange in every
    step, and gradients averaged in every step by a job that torchrun restarts from its last checkpoint ("restarting").
    A step takes 0.2 s at least, most of it asleep, as if an accelerator computed it, so that four workers fit on two
    cores.

    Examples:
      python -m experiments bench members --json benchmarks/local/members.json
      python -m experiments bench members --seconds 600
      python -m experiments bench members --seconds 150 --kill-every 30 --absent 15 --seed 1 --modes undisturbed members

    Args:
        seconds: length of each run, with the start of its processes.
        kill_every: seconds from one death to the next; workers die in turn.
        absent: seconds from a death until the worker is started again.
        seed: of the model's first weights, of the data's order and of the compressor's draws.
        modes: which of the runs.
        json: write the figures to this file; those of other modes and seeds that it holds stay.
    """
    console = Console(highlight=False)
    if unknown := set(modes) - set(MODES):
        console.print(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
        return 2
    lab.need_network()
    results = Results("python -m experiments bench members")
    results.about = {"seconds": seconds, "kill_every_s": kill_every, "absent_s": absent, "workers": WORKERS}
    results.about |= {"step_s": STEP_S, "every": EVERY, "rate": "100mbit", "task": asdict(TASK)}
    results.about |= {"join_timeout_ms": JOIN_TIMEOUT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
    if json is not None and json.exists():
        before = jsons.loads(json.read_text())
        if before["about"] == jsons.loads(jsons.dumps(results.about)):
            anew = [f"{mode}/{seed}/" for mode in modes]
            results.results = [row for row in before["results"] if not row["name"].startswith(tuple(anew))]
    kills = [1 + i % WORKERS for i in range(int((seconds - 1) // kill_every))]
    for mode in modes:
        schedule: list[str] = []
        if mode != "undisturbed":
            for i, rank in enumerate(kills, 1):
                schedule += [f"kill {rank}@{i * kill_every}s"]
                schedule += [f"join {rank}@{i * kill_every + absent}s"] if i * kill_every + absent < seconds else []
        run = _run(mode, seed, seconds, schedule)
        if not run.curve:
            console.print(f"{mode}: nothing was kept\n{run.errors[-3000:]}")
            return 1
        _add(results, mode, seed, run, 0 if mode == "undisturbed" else len(kills))
        _add_comparisons(results)
        show("members", results, json)
    return 0


def _run(mode: str, seed: int, seconds: int, schedule: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory(prefix="thinwire-members-") as name:
        folder = Path(name)
        (folder / "schedule").write_text("".join(f"{line}\n" for line in schedule))
        config = {"mode": "synchronous" if mode == "restarting" else "managed", "folder": name, "seed": seed}
        config |= {"task": asdict(TASK), "workers": WORKERS, "step_s": STEP_S, "save_every": EVERY}
        config |= {"every": 1 if mode == "every-step" else EVERY}
        config |= {"join_timeout_ms": JOIN_TIMEOUT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
        # Rank 0 is a place that outlives workers; no figure counts it.
        argv = [sys.executable, "-m", "thinwire", "lab", "--ranks", str(WORKERS + 1), "--rate", "100mbit"]
        argv += ["--timeout", str(seconds), "--schedule", str(folder / "schedule"), "--json", str(folder / "lab.json")]
        argv += ["--count", r"kept (\d+) tokens"]
        argv += ["--", *NAMED, sys.executable, "-m", "experiments.bench.members_rank", jsons.dumps(config)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds + 120)
        if not (folder / "lab.json").exists():
            return Run({}, {}, 0.0, [], 0, 0, 0, 0.0, done.stderr)
        rows = {row["name"]: row["value"] for row in jsons.loads((folder / "lab.json").read_text())["results"]}
        notes = [jsons.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in _whole_lines(path)]
        _evaluate(notes, folder)
    step_tokens = TASK.batch * TASK.model.context
    present = rows["rank_seconds"] - rows["seconds"]
    goodput = {
        "of_all_workers": rows["counted"] / (step_tokens / STEP_S * WORKERS * rows["seconds"]),
        "of_present_workers": rows["counted"] / (step_tokens / STEP_S * present),
    }
    shares = _shares(notes, rows["counted"] / step_tokens * STEP_S, present) if mode != "restarting" else {}
    if shares:
        goodput["of_started_workers"] = goodput["of_present_workers"] / (1.0 - shares["starting"])
    sent = sum(value for name, value in rows.items() if name.startswith("sent_bytes/") and name[-1] != "0")
    departures = len(re.findall(LEAVES, done.stderr))
    return Run(goodput, shares, rows["counted"], *_digest(notes), departures, sent, done.stderr)


def _evaluate(notes: list[dict[str, Any]], folder: Path) -> None:
    """Add the held-out loss to each note whose weights were saved, now that nobody waits for it."""
    model = TASK.build(seed=0)
    losses: dict[str, float] = {}
    for note in notes:
        path = folder / f"{note['weights']}.pt"
        if note["kept"] and path.exists() and note["weights"] not in losses:
            weights = torch.load(path, weights_only=True)
            with torch.no_grad():
                for p, values in zip(
                    model.parameters(), weights.split([p.numel() for p in model.parameters()]), strict=True
                ):
                    p.copy_(values.view_as(p))
                total, count = TASK.evaluate(model, 0, 1, probe=True)
            losses[note["weights"]] = total / count
            note["loss"] = losses[note["weights"]]


def _shares(notes: Sequence[dict[str, Any]], kept_s: float, present_s: float) -> dict[str, float]:
    """What workers spent their time on, as shares of ``present_s``: steps that are kept, and what they noted.

    The rest are steps that are in no exchange, and whatever a worker did after its last note.
    """
    spent = Counter[str]()
    for note in notes:
        spent.update(note["seconds"])
    seconds = {"kept_steps": kept_s, **spent}
    return {name: value / present_s for name, value in seconds.items()} | {
        "lost": 1.0 - sum(seconds.values()) / present_s
    }


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


def _add(results: Results, mode: str, seed: int, run: Run, num_kills: int) -> None:
    name = f"{mode}/{seed}"
    for what, value in run.goodput.items():
        results.add(f"{name}/goodput/{what}", value, "")
    for what, value in run.shares.items():
        results.add(f"{name}/time/{what}", value, "")
    results.add(f"{name}/kept_tokens", run.kept, "")
    results.add(f"{name}/loss", run.curve[-1][1], "nats/byte", tokens=run.curve[-1][0], curve=run.curve)
    results.add(f"{name}/exchanges_compared", run.compared, "")
    results.add(f"{name}/exchanges_differing", run.differing, "")
    results.add(f"{name}/kills", num_kills, "")
    results.add(f"{name}/lines_of_departure", run.departures, "")
    results.add(f"{name}/sent_bytes_per_token", run.sent_bytes / run.kept, "B")


def _add_comparisons(results: Results) -> None:
    """Tokens kept over those of the undisturbed run of that seed, and the loss over its, at the most tokens of both."""
    compared = ("/kept_of_undisturbed", "/loss_excess")
    results.results = [row for row in results.results if not row["name"].endswith(compared)]
    rows = {row["name"]: row for row in results.results}
    for name, row in rows.items():
        mode, seed, *_ = name.split("/")
        whole = rows.get(f"undisturbed/{seed}/kept_tokens")
        if name.endswith("/kept_tokens") and whole is not None:
            results.add(f"{mode}/{seed}/kept_of_undisturbed", row["value"] / whole["value"], "")
        if name.endswith("/loss") and mode == "members" and whole is not None:
            undisturbed = rows[f"undisturbed/{seed}/loss"]["curve"]
            ends = [(tokens, loss) for tokens, loss in row["curve"] if _loss_at(undisturbed, tokens)]
            if ends:
                tokens, loss = ends[-1]
                reference = _loss_at(undisturbed, tokens)
                assert reference is not None
                results.add(f"members/{seed}/loss_excess", loss / reference - 1, "", tokens=tokens)
