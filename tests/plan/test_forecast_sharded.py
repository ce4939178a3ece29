"""Steps of sharded models, predicted: against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.compressors import parse
from thinwire.plan import sharded_plan
from thinwire.plan.filters import Filter
from thinwire.plan.forecast import Curve, Links, Transfer
from thinwire_tools.doctor.forecast import (
    Event,
    Move,
    ShardedPace,
    move_transfer,
    native_sharded_step,
    sharded_bytes,
    sharded_step,
)

LAYER = (1000, 100)
MODULES = ("root", "0", "1", "2")


def pace(*, late: bool = True, shared: float = 0.0) -> ShardedPace:
    """Root and three blocks, each 0.1 s forward and 0.2 s backward; the root is gathered once. 0.1 s of optimizer.

    FSDP2 asks for the weights of the block before while one goes backward, and reduces behind each.
    """
    moves: list[Move] = []
    events: list[Event] = []

    def add(module: str, at: float, kind: str, needed: float | None) -> None:
        number = len(moves)
        moves.append(Move(at, ((f"{module}.weight", LAYER),), 4, kind, module, late))  # pyright: ignore[reportArgumentType]
        events.append(Event(at, number, needed=False))
        if needed is not None:
            events.append(Event(needed, number, needed=True))

    for i, module in enumerate(MODULES):
        add(module, max(0.0, 0.1 * (i - 1)), "all_gather", max(0.0, 0.1 * (i - 1)))
    for i, module in enumerate(MODULES[:0:-1]):
        add(module, 0.3 + 0.2 * max(0, i - 1), "all_gather", 0.3 + 0.2 * i)
        add(module, 0.5 + 0.2 * i, "reduce_scatter", None)
    add("root", 0.9, "reduce_scatter", None)
    # By time; of what happens at one time a need comes before what is asked for then, and after its own asking.
    order = sorted(range(len(events)), key=lambda i: (round(events[i].at_s, 6), i))
    return ShardedPace(tuple(moves), tuple(events[i] for i in order), 1.0, 0.9, shared)


def transfers(of: ShardedPace, seconds: float, **more: float) -> list[Transfer]:
    return [Transfer(seconds, seconds, **more)] * len(of.moves)


def test_what_takes_no_time_costs_none() -> None:
    assert sharded_step(pace(), transfers(pace(), 0.0)) == pytest.approx(1.0)
    assert pace().backward_end_s == pytest.approx(0.9)


def test_pytorchs_own_collectives_stop_the_step() -> None:
    of = pace()
    assert len(of.moves) == 4 + 3 + 4
    assert native_sharded_step(of, [0.05] * 11) == pytest.approx(1.55)


def test_gathers_stop_forward_and_reductions_hide_behind_backward() -> None:
    # Forward waits for 4 gathers, backward for the one that it asks for first; two reductions end after it.
    assert sharded_step(pace(), transfers(pace(), 0.05)) == pytest.approx(1.0 + 4 * 0.05 + 0.05 + 2 * 0.05)
    # Reductions that are read at once stop it, too: four of them, and no gather waits behind one then.
    at_once = pace(late=False)
    assert sharded_step(at_once, transfers(at_once, 0.05)) == pytest.approx(1.0 + 4 * 0.05 + 0.05 + 4 * 0.05)


def test_what_is_gathered_ahead_hides_behind_forward() -> None:
    ahead = pace().ahead()
    forward = [(event.move, event.needed) for event in ahead.events[:8]]
    # Blocks 0 and 1 are asked for once the root is there, block 2 once block 0 is.
    assert forward == [(0, False), (0, True), (1, False), (2, False), (1, True), (3, False), (2, True), (3, True)]
    assert sorted(ahead.events) == sorted(e for e in ahead.events if e.at_s <= 0.9)
    assert [e.at_s for e in ahead.events] == sorted(e.at_s for e in ahead.events)
    # The root, block 0 and then nothing in forward; as before in backward.
    assert sharded_step(ahead, transfers(ahead, 0.05)) == pytest.approx(1.0 + 2 * 0.05 + 0.05 + 2 * 0.05)
    assert ahead.ahead() == ahead
    assert len(ahead.moves) == len(pace().moves)
    for event in pace().events:
        earlier = next(e for e in ahead.events if e.move == event.move and e.needed == event.needed)
        assert earlier.at_s <= event.at_s
        assert not event.needed or earlier.at_s == event.at_s


def test_weights_that_stay_are_gathered_once() -> None:
    kept = pace().kept()
    assert [move.kind for move in kept.moves].count("all_gather") == 4
    assert [kept.moves[event.move].module for event in kept.events if event.needed] == list(MODULES)
    assert kept.kept() == kept
    assert sharded_step(kept, transfers(kept, 0.05)) == pytest.approx(1.0 + 4 * 0.05 + 2 * 0.05)


def test_a_core_that_communicates_computes_less() -> None:
    # Three reductions of 0.05 s beside backward; what is waited for takes nothing away.
    busy = pace(shared=1.0)
    free = sharded_step(pace(), transfers(pace(), 0.05))
    slowed = sharded_step(busy, transfers(busy, 0.05, cpu_s=0.04))
    assert free + 0.1 < slowed < free + 0.3
    half = replace(busy, shared=0.5)
    assert free < sharded_step(half, transfers(half, 0.05, cpu_s=0.04)) < slowed


def test_a_move_sends_its_share_once() -> None:
    of = pace()
    shapes = {f"{module}.weight": LAYER for module in MODULES}
    spec = "minmax(bits=8, bucket=1000)"
    plan = sharded_plan(shapes, {"weights": spec, "gradients": "raw"}, Filter())
    links = Links(Curve(((0.0, 0.0), (1e6, 1.0))), Curve(((0.0, 0.0), (1e6, 1.0))), 4, exchange_cpu=1e-7)
    codecs = {parse(spec): (4e-7, 2e-7)}
    # A quarter of the elements is encoded, all are decoded; three quarters of the bytes cross.
    encoded = parse(spec).wire_bytes(LAYER)
    gather = move_transfer(of.moves[0], plan.layers, links, codecs)
    assert gather.codec_s == pytest.approx(100_000 * (1e-7 + 2e-7))
    assert gather.alone_s == pytest.approx(0.75 * encoded * 1e-6 + gather.codec_s)
    assert gather.cpu_s == pytest.approx(gather.codec_s + 0.75 * encoded * 1e-7)
    reduction = next(move for move in of.moves if move.kind == "reduce_scatter")
    raw = move_transfer(reduction, plan.layers, links, codecs)
    assert raw.alone_s == pytest.approx(0.75 * 400_000 * 1e-6, rel=0.01)
    total = 7 * encoded + 4 * parse("raw").wire_bytes(LAYER)
    assert sharded_bytes(of, links, plan.layers) == pytest.approx(0.75 * total)
    assert sharded_bytes(of, links, None) == pytest.approx(0.75 * 11 * 400_000)
