"""``python -m experiments chaos``: seeded faults in trainings, judged by what every surviving rank meets, and when.

The promise: every failure ends, on every surviving rank, within the timeout plus five seconds, with an error that names
the rank that caused it; survivors can still write a checkpoint; what was trained until then is what a training without
a fault has. Stock DDP meets the same faults beside it.
"""

from __future__ import annotations

import json as json_
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.framework.pages import show
from experiments.framework.ranks import RunCache
from experiments.validation.chaos_rank import Scenario, Training, draw, main as rank_main
from thinwire_tools.lab import free_port
from thinwire_tools.results import OutputFile, Results

_SLACK_S = 5.0
_HANG_S = 30.0
"""Beyond the timeout and the slack, after which a rank is taken to hang."""
_processes = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining", "thinwire.pipeline.stage"]
"""What every rank imports, loaded once by the fork server."""


@dataclass
class Survivor:
    """What a rank met that was not struck."""

    rank: int
    kind: str = ""
    """The error's type; ``finished`` without one, ``aborted`` by a signal, ``hung`` at the end."""
    named: bool = False
    """Whether the error has the victim's rank."""
    seconds: float = 0.0
    """From the fault until the error."""
    saved: bool | None = None
    """Whether it wrote a checkpoint afterwards; None where there was nothing to write."""
    wrong_digests: int = 0
    text: str = ""


@dataclass
class Outcome:
    """What became of a scenario."""

    scenario: Scenario
    survivors: list[Survivor] = field(default_factory=list)
    digests: dict[int, list[str]] = field(default_factory=dict)
    """By rank, of the parameters after each step."""
    struck: bool = False


def run(scenario: Scenario, reference: dict[int, list[str]] | None = None) -> Outcome:
    """Train, let the fault happen, and look at every rank but the victim. ``reference``: the digests without it."""
    outcome = Outcome(scenario)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        pipes: dict[int, Connection] = {}
        children: list[Any] = []
        for rank in range(scenario.training.num_ranks):
            mine, theirs = _processes.Pipe(duplex=False)
            child = _processes.Process(target=rank_main, args=(scenario, rank, port, folder, theirs), daemon=True)
            child.start()
            theirs.close()
            pipes[rank] = mine
            children.append(child)
        heard = _listen(pipes, scenario)
        for rank, child in enumerate(children):
            waited = rank != scenario.victim and any("ended" in message for message in heard[rank])
            child.join(5.0 if waited else 0.2)
            aborted = child.exitcode is not None and child.exitcode < 0
            if child.is_alive():
                child.kill()
                child.join()
            outcome.digests[rank] = [message["digest"] for message in heard[rank] if "digest" in message]
            if rank != scenario.victim:
                outcome.survivors.append(_survivor(rank, heard, scenario, aborted=aborted))
    outcome.struck = any("struck" in message for messages in heard.values() for message in messages)
    for survivor in outcome.survivors:
        if reference is None:
            break
        pairs = zip(outcome.digests[survivor.rank], reference[survivor.rank], strict=False)
        survivor.wrong_digests = sum(here != there for here, there in pairs)
    return outcome


def _listen(pipes: dict[int, Connection], scenario: Scenario) -> dict[int, list[dict[str, Any]]]:
    """What the ranks say, by rank, until all but the victim have ended or time is over."""
    heard: dict[int, list[dict[str, Any]]] = {rank: [] for rank in pipes}
    ranks = {pipe: rank for rank, pipe in pipes.items()}
    deadline = time.monotonic() + 120.0
    while any(rank != scenario.victim for rank in ranks.values()) and time.monotonic() < deadline:
        for pipe in wait(list(ranks), timeout=1.0):
            assert isinstance(pipe, Connection)
            rank = ranks[pipe]
            try:
                message = json_.loads(pipe.recv_bytes())
            except EOFError:
                del ranks[pipe]
                continue
            heard[rank].append(message)
            if "struck" in message:
                deadline = time.monotonic() + scenario.timeout_s + _SLACK_S + _HANG_S
    return heard


def _survivor(rank: int, heard: dict[int, list[dict[str, Any]]], scenario: Scenario, *, aborted: bool) -> Survivor:
    struck = next((message["at"] for message in heard.get(scenario.victim, ()) if "struck" in message), 0.0)
    outcome = next((message for message in heard[rank] if "outcome" in message), None)
    if outcome is None:
        return Survivor(rank, "aborted" if aborted else "hung")
    saved = next((message["saved"] for message in heard[rank] if "saved" in message), None)
    if outcome["outcome"] == "finished":
        return Survivor(rank, "finished", saved=saved)
    ended = any("ended" in message for message in heard[rank])
    return Survivor(
        rank,
        outcome["kind"] if ended and not aborted else "aborted",
        named=outcome["rank"] == scenario.victim,
        seconds=round(outcome["at"] - struck, 2),
        saved=saved,
        text=outcome["text"],
    )


def chaos(
    *,
    faults: int = 100,
    seed: int = 0,
    timeout: float = 8.0,
    control: bool = True,
    minutes: float | None = None,
    jobs: int = 1,
    folder: Path | None = None,
    json: OutputFile = None,
) -> int:
    """Let one rank of a training fail in a seeded way, many times, and judge what the others meet.

    A fault is drawn among SIGKILL, SIGSTOP, SIGINT, SIGTERM, a rank that sleeps for ever, an exception in the script,
    an end without a word and sockets that are shut down; its place before compress, in forward, in backward, between
    steps or before a checkpoint; under DDP, DDP before its start, FSDP2 or a pipeline; over shared memory or gloo.
    Stock DDP meets the same fault beside it.

    Examples:
      python -m experiments chaos --faults 1000 --folder build/chaos --json benchmarks/validation/chaos.json
      python -m experiments chaos --faults 5 --seed 3

    Args:
        faults: number of scenarios.
        seed: what they are drawn from.
        timeout: of the process groups that messages go through, in seconds.
        control: whether stock DDP meets each fault, too.
        minutes: begin no scenario after so long.
        jobs: scenarios that run at a time; most of their time they wait.
        folder: where outcomes are kept: scenarios that have one there are not run again.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    _processes.set_forkserver_preload(PRELOADED)
    references: dict[Training, dict[int, list[str]]] = {}
    until = time.monotonic() + 60.0 * (minutes if minutes is not None else 1e6)

    # So that a run of hours can go on where it was ended.
    kept = RunCache(folder)

    def one(number: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for scenario in draw(seed, number, timeout)[: 1 + control]:
            key = {"number": number, "scenario": asdict(scenario)}
            known, outcome = kept.get(key), None
            if known is not None:
                outcome = Outcome(scenario, [Survivor(**one) for one in known["survivors"]], struck=known["struck"])
            elif time.monotonic() < until:
                if scenario.training not in references:
                    quiet = replace(scenario, fault="", phase="", victim=-1, step=-1)
                    references[scenario.training] = run(quiet).digests
                outcome = run(scenario, references[scenario.training])
                kept.put(key, {"survivors": [asdict(one) for one in outcome.survivors], "struck": outcome.struck})
            if outcome is None:
                break
            outcomes.append(outcome)
            for survivor in outcome.survivors:
                ours = scenario.training.attachment != "stock" and outcome.struck
                if ours and not _kept(survivor, timeout):
                    console.print(f"{number}: {_brief(scenario)}: {survivor}", markup=False)
        return outcomes

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = [outcome for several in pool.map(one, range(faults)) for outcome in several]
    summaries = {name: summary(group, timeout) for name, group in _groups(outcomes).items()}
    ours = [o for o in outcomes if o.scenario.training.attachment != "stock" and o.struck]
    missed = [{"scenario": asdict(o.scenario), **asdict(s)} for o in ours for s in o.survivors if not _kept(s, timeout)]
    about = {"faults": len(ours), "seed": seed, "timeout_s": timeout, "jobs": jobs, "missed": missed}
    results = Results("python -m experiments chaos", about=about)
    for name, figures in summaries.items():
        for figure, value in figures.items():
            results.add(f"{figure}/{name}", value, "s" if figure.endswith("_s") else "")
    show("chaos", results, json)
    aborts = sum(survivor["kind"] == "aborted" for survivor in missed)
    aborts_of_stock = summaries.get("stock DDP", {}).get("aborted", 0)
    return int(len(missed) > aborts or aborts > aborts_of_stock)


def _kept(survivor: Survivor, timeout: float) -> bool:
    """Whether the promise was kept."""
    in_time = survivor.kind == "finished" or (survivor.named and survivor.seconds <= timeout + _SLACK_S)
    return in_time and survivor.saved is not False and not survivor.wrong_digests


def _brief(scenario: Scenario) -> str:
    t = scenario.training
    return f"{t.attachment} {t.spec} {t.transport}: {scenario.fault} of rank {scenario.victim} at {scenario.phase}"


def _groups(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    labels = {"ddp": "DDP", "dense": "DDP, dense steps", "fsdp": "FSDP2", "pipeline": "pipeline", "stock": "stock DDP"}
    groups: dict[str, list[Outcome]] = {label: [] for label in labels.values()}
    for outcome in outcomes:
        groups[labels[outcome.scenario.training.attachment]].append(outcome)
    return {label: group for label, group in groups.items() if group}


def summary(outcomes: Iterable[Outcome], timeout: float) -> dict[str, float]:
    """Counts over faults that did happen."""
    outcomes = [outcome for outcome in outcomes if outcome.struck]
    survivors = [survivor for outcome in outcomes for survivor in outcome.survivors]
    kinds = Counter(survivor.kind for survivor in survivors)
    failed = [s for s in survivors if s.kind not in ("finished", "hung", "aborted")]
    return {
        "faults": len(outcomes),
        "survivors": len(survivors),
        "failed": len(failed),
        "named": sum(survivor.named for survivor in failed),
        "finished": kinds["finished"],
        "hung": kinds["hung"],
        "aborted": kinds["aborted"],
        "late": sum(survivor.seconds > timeout + _SLACK_S for survivor in failed),
        "latest_s": max((survivor.seconds for survivor in failed), default=0.0),
        "checkpoints_failed": sum(survivor.saved is False for survivor in failed),
        "wrong_digests": sum(survivor.wrong_digests for survivor in survivors),
    }
