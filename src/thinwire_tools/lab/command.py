"""The command ``thinwire lab``: run any command on every rank of a slow network made on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.lab.launch import Outcome, launch
from thinwire_tools.lab.schedule import Event, Kind, read_schedule
from thinwire_tools.results import OutputFile, Results


def lab(
    command: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    ranks: int = 2,
    ranks_per_node: int = 1,
    rate: str | None = None,
    rtt: str | None = None,
    loss: str | None = None,
    nat: tuple[int, ...] = (),
    timeout: float | None = None,
    kill: tuple[str, ...] = (),
    pause: tuple[str, ...] = (),
    cut: tuple[str, ...] = (),
    join: tuple[str, ...] = (),
    schedule: Path | None = None,
    count: str | None = None,
    possible: float | None = None,
    json: OutputFile = None,
) -> int:
    r"""Run a command on every rank of a slow network made on this machine.

    Each rank gets a network of its own, and the variables torchrun would set, so a script that reads RANK,
    WORLD_SIZE and MASTER_ADDR runs as it is. Nothing is left behind, however it ends.

    Goodput is what a training has kept over what it could have: ranks print how many tokens they have trained on once
    those are in a state that outlives them (shared weights, a checkpoint), and --count adds these numbers up.

    Examples:
      thinwire lab --ranks 2 --rate 100mbit -- python train.py --epochs 1
      thinwire lab --ranks 2 --rate 1gbit,100mbit --rtt 20ms -- python train.py
      thinwire lab --ranks 4 --ranks-per-node 2 --rate 100mbit -- python train.py
      thinwire lab --kill 1@60s --join 1@90s --cut 0@30s..40s -- python train.py
      thinwire lab --rate 100mbit --rtt 40ms --loss 0.5% -- python train.py
      thinwire lab --count 'kept (\d+) tokens' --possible 5000 -- python train.py

    Args:
        command: command of each rank, after two dashes.
        ranks: how many ranks.
        ranks_per_node: how many of them, in order, share a node, and its link.
        rate: rate of each node's link, each way: 100mbit, 2.5gbit; or one for each node: 1gbit,100mbit.
        rtt: round-trip time to add, as 20ms.
        loss: share of packets that are lost, each way, as 1%. Needs a rate.
        nat: ranks that others cannot connect to, as behind a home router.
        timeout: seconds after which all ranks are ended.
        kill: ranks that are killed, and when: 1@60s.
        pause: ranks that stand still, from and until: 1@30s..45s.
        cut: ranks whose node's link is down, from and until: 1@30s..45s.
        join: ranks that are started only then, or again after they were killed: 1@90s.
        schedule: a file of such events, one a line: kill 1@60s.
        count: pattern of what ranks print, with one group: the number that is added up.
        possible: number that an undisturbed rank would add up in a second; the report then has the goodput.
        json: write the link and each node's bytes to this file.

    Returns:
        The exit code: the first failing rank's, or 0.
    """
    with ends_command(ValueError, OSError, RuntimeError):
        if not command:
            raise ValueError("give the command that each rank runs after two dashes: -- python train.py")
        given_to_python = without_python(command)
        if len(given_to_python) < len(command) and not given_to_python[0].startswith("-"):
            check_script(given_to_python)  # once, not on every rank
        events = [] if schedule is None else read_schedule(schedule.read_text().splitlines())
        given: tuple[tuple[Kind, tuple[str, ...]], ...]
        given = (("kill", kill), ("pause", pause), ("cut", cut), ("join", join))
        events += [Event.parse(kind, text) for kind, texts in given for text in texts]
        outcome = launch(
            command,
            num_ranks=ranks,
            ranks_per_node=ranks_per_node,
            rate=rate,
            rtt=rtt,
            loss=loss,
            nat=nat,
            timeout=timeout,
            events=events,
            count=count,
            possible=possible,
        )
    if json is not None:
        _results(outcome, command, "rank" if ranks_per_node == 1 else "node").write(json)
    return outcome.exit_code


def _results(outcome: Outcome, command: Sequence[str], whose: str) -> Results:
    """Return all figures, for ``--json``. ``whose``: the owner of a link, a rank or a node."""
    results = Results("lab", about={"command": list(command), "link": outcome.link})
    results.add("exit_code", outcome.exit_code, "")
    results.add("seconds", outcome.seconds, "s")
    results.add("rank_seconds", outcome.rank_seconds, "s")
    if outcome.counted is not None:
        results.add("counted", outcome.counted, "")
    for name, value in outcome.goodput.items():
        results.add(f"goodput/{name}", value, "")
    for number, (sent, received) in enumerate(outcome.link_bytes):
        results.add(f"sent_bytes/{whose}{number}", sent, "B")
        results.add(f"received_bytes/{whose}{number}", received, "B")
    return results
