"""A training and the fault that is to happen in it, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = ("kill", "stop", "interrupt", "terminate", "hang", "raise", "exit", "sockets")
"""SIGKILL; SIGSTOP; SIGINT, as of Ctrl-C; SIGTERM; a rank that sleeps for ever; an exception in the script; an end
without a word; all its TCP sockets shut down."""
PHASES = ("compress", "forward", "backward", "between", "checkpoint")
"""Before `thinwire.compress`; in the forward pass; among the buckets of a backward pass; between two steps; before
`gather_state_dict`, which the others have begun."""
STEPS = 4


@dataclass(frozen=True)
class Training:
    """What is trained, and how its messages are sent."""

    attachment: str
    """``ddp``, ``dense`` (compression starts later than the training ends), ``fsdp``, ``pipeline``, or ``stock``: DDP
    without thinwire."""
    spec: str
    transport: str
    num_ranks: int = 3


TRAININGS = (
    *(
        Training("ddp", spec, transport)
        for spec in ("minmax(bits=4)", "ef(minmax(bits=2))", "powersgd(rank=2)", "topk(density=0.1)")
        for transport in ("shared", "group")
    ),
    *(Training("dense", "minmax(bits=4)", transport) for transport in ("shared", "group")),
    *(
        Training("fsdp", spec, transport)
        for spec in ("minmax(bits=8)", "minmax(bits=4)")
        for transport in ("shared", "group")
    ),
    *(Training("pipeline", spec, "group") for spec in ("maxabs(bits=4)", "maxabs(bits=8)")),
)


@dataclass(frozen=True)
class Scenario:
    """A training, and what happens to one of its ranks."""

    training: Training
    timeout_s: float
    fault: str = ""
    """One of `FAULTS`; none at all if empty."""
    phase: str = ""
    victim: int = -1
    step: int = -1


def draw(seed: int, number: int, timeout_s: float) -> tuple[Scenario, Scenario]:
    """The scenario of a number, and its control: the same fault in stock DDP."""
    random_ = random.Random(f"{seed} {number}")
    training = random_.choice(TRAININGS)
    phases = [
        p for p in PHASES if training.attachment in ("ddp", "dense", "fsdp") or p not in ("compress", "checkpoint")
    ]
    what = {
        "fault": random_.choice(FAULTS),
        "phase": random_.choice(phases),
        "victim": random_.randrange(training.num_ranks),
        "step": random_.randrange(1, STEPS - 1),
    }
    control = Training("stock", "", "group", training.num_ranks)
    return Scenario(training, timeout_s, **what), Scenario(control, timeout_s, **what)
