"""One rank of ``python -m experiments bench auto``."""

from __future__ import annotations

from typing import Any

import thinwire
from thinwire_tools.bench.rank import serve
from thinwire_tools.bench.turns import Turns, gpt, token_batch

# One decision, and long enough after it that no second one comes.
_AUTO: dict[str, Any] = {"warmup": 8, "window": 4, "lag": 3, "every": 100_000}


def decide_and_take(spec: str, cap_mb: float, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """What ``auto`` decides, and seconds of a step by method and round, the methods in turn."""
    models = {name: gpt(cap_mb) for name in ("fp32", "fixed", "one way", "auto")}
    wires = {
        "fixed": thinwire.compress(models["fixed"], spec, skip_if_slower=False),
        "one way": thinwire.compress(models["one way"], thinwire.policies.Auto(algorithms=("sra",), **_AUTO)),
        "auto": thinwire.compress(models["auto"], thinwire.policies.Auto(**_AUTO)),
    }
    turns, tokens = Turns(models), token_batch(batch)
    for name in ("one way", "auto"):
        for _ in range(_AUTO["warmup"]):
            turns.step(name, tokens)
    times = turns.seconds(tokens, rounds, steps)
    decided = {name: wires[name].decisions[-1].note for name in ("one way", "auto")}
    algorithm = str(wires["auto"].algorithm)
    for wire in wires.values():
        wire.detach()
    return {"times": times, "decided": decided, "algorithm": algorithm}


def main() -> None:
    serve(decide_and_take)
