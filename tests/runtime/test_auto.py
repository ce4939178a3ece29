"""``thinwire.compress(model, "auto")``: decides from measured links, is the same on every rank, resumes, says why."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire
from auto_training import advance, train, wrapped
from harness import on_ranks
from nets import assert_replicas_identical, fingerprint
from thinwire.plan.forecast import Bucket, Curve, Links, Pace
from thinwire.policies import Evidence, StepTime
from thinwire_tools import lab
from thinwire_tools.ranks import run_ranks as run_in

pytestmark = pytest.mark.alone
SHAPE = (512, 512)
LAYERS = {"w": thinwire.parse("minmax(bits=4, bucket=128)")}
PACE = Pace((Bucket(0.0, (("w", SHAPE), ("b", (512,)))),), 0.02)
"""20 ms of computing, and a megabyte that becomes ready at its end."""


def link(bytes_per_s: float) -> Links:
    curve = Curve(((0.0, 1e-4), (1e7, 1e-4 + 1e7 / bytes_per_s)))
    return Links(curve, curve, 2)


def evidence(bytes_per_s: float, *, seconds: float, compressed: bool = False, **more: Any) -> Evidence:
    codec_s = dict.fromkeys(thinwire.policies.Auto().to_measure(LAYERS), 2e-9)
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    step = StepTime(PACE, seconds, compressed)
    about: dict[str, Any] = {"links": link(bytes_per_s), "codec_s": codec_s, "steps": (step,) * 3} | more
    present = LAYERS if compressed else {"w": thinwire.compressors.Raw()}
    return Evidence(LAYERS, present, {"w": gradient}, 2, **about)


def test_compresses_over_a_slow_link_within_the_error() -> None:
    # 1 MB at 10 MB/s: 105 ms beside 20 ms of computing.
    found = thinwire.policies.Auto().propose(evidence(1e7, seconds=0.125))
    assert found.note.startswith("on: a step takes 125 ms uncompressed and would take")
    assert found.layers["w"] != thinwire.compressors.Raw()
    gradient = evidence(1e7, seconds=0.1).gradients["w"]
    assert 0 < found.errors["w"] <= 0.15**2 * float(gradient.square().sum())
    loose = thinwire.policies.Auto(error=0.5).propose(evidence(1e7, seconds=0.125)).layers["w"]
    tight = thinwire.policies.Auto(error=0.01).propose(evidence(1e7, seconds=0.125)).layers["w"]
    sizes = [c.wire_bytes(SHAPE) for c in (loose, found.layers["w"], tight)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2]


def test_leaves_a_fast_link_alone() -> None:
    # A megabyte in 0.1 ms: 4 bits would save less than they cost.
    found = thinwire.policies.Auto().propose(evidence(1e10, seconds=0.0205))
    assert found.layers == {"w": thinwire.compressors.Raw()}
    assert found.note.startswith("off: a step takes")


def test_leaves_alone_what_backward_hides() -> None:
    hidden = replace(PACE, buckets=(*PACE.buckets, Bucket(0.019, (("late", (1,)),))), compute_s=0.02)
    steps = (StepTime(hidden, 0.02, False),) * 3
    # 4.5 ms for the megabyte, all of it before backward ends.
    found = thinwire.policies.Auto().propose(evidence(2.5e8, seconds=0.02, steps=steps))
    assert found.layers == {"w": thinwire.compressors.Raw()}


def test_names_other_ways_to_train_where_compression_cannot_hide_the_network() -> None:
    # 148 kB of 4-bit messages take 148 ms beside 20 ms of computing.
    slow = thinwire.policies.Auto().propose(evidence(1e6, seconds=1.07)).note
    named = re.search(r"; (\d+)% of the shortest .* take (\d+) ms, .*DiLoCo in 2 bits, every=(\d+), (\d+) ms", slow)
    assert named, slow
    share, optimizer_ms, every, local_ms = map(int, named.groups())
    assert share > 80
    # 262 144 elements in 2 bits with a scale for each 128 are 74 kB: 76 ms, and less than a twentieth of 100 steps.
    assert optimizer_ms == pytest.approx(96, abs=4)
    assert every == 100
    assert local_ms <= 21
    for bytes_per_s, seconds in ((1e10, 0.0205), (1e8, 0.03)):
        assert "DiLoCo" not in thinwire.policies.Auto().propose(evidence(bytes_per_s, seconds=seconds)).note


def test_switches_off_what_turned_out_no_faster_and_remembers() -> None:
    auto = thinwire.policies.Auto()
    first = auto.propose(evidence(1e7, seconds=0.125))
    assert first.note.startswith("on")
    # Compressed steps took as long: whatever was predicted, it did not pay.
    second = auto.propose(evidence(1e7, seconds=0.13, compressed=True, memory=first.memory))
    assert second.note.startswith("off")
    third = auto.propose(evidence(1e7, seconds=0.125, memory=second.memory))
    assert third.note.startswith("off")
    # Over a link that has become four times as slow it is tried again.
    fourth = auto.propose(evidence(2.5e6, seconds=0.44, memory=third.memory))
    assert fourth.note.startswith("on")
    # And where it paid, it stays on.
    fifth = auto.propose(evidence(2.5e6, seconds=0.1, compressed=True, memory=fourth.memory))
    assert fifth.note.startswith("on: a step takes 440 ms")


def test_without_links_or_steps_nothing_is_decided() -> None:
    assert thinwire.policies.Auto().propose(evidence(1e7, seconds=0.1, links=None)).layers == {
        "w": thinwire.compressors.Raw()
    }
    kept = thinwire.policies.Auto().propose(evidence(1e7, seconds=0.1, compressed=True, steps=()))
    assert kept.layers == LAYERS
    assert "no step was timed" in kept.note


@on_ranks(1)
def test_misuse_says_what_to_do(rank: int) -> None:
    for arguments, options, said in (
        (("auto",), {"adapt": "lgreco()"}, "give one of them"),
        (("auto",), {"simulate": True}, "give a compressor instead"),
        ((), {"adapt": "auto"}, "takes the place of the compressor"),
        (("auto(errors=1)",), {}, r"Did you mean 'auto\(error=1\)'\?"),
    ):
        with pytest.raises(ValueError, match=said):
            thinwire.compress(wrapped(0.0), *arguments, **options)


OPTIONS = thinwire.policies.Auto(every=8, warmup=5, window=2, lag=2, gain=0.6)


@on_ranks(2)
def test_is_off_where_computing_takes_the_time(rank: int) -> None:
    torch.set_num_threads(1)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("thinwire.adapt").addHandler(handler)
    logging.getLogger("thinwire.adapt").setLevel(logging.INFO)
    model = wrapped(0.02)
    wire = thinwire.compress(model, OPTIONS)
    advance(model, rank, 0, 15)
    assert_replicas_identical(model)
    assert wire.stats.compressed_steps == 0
    assert [d.step for d in wire.decisions] == [5, 13]
    assert all(d.note.startswith("off") for d in wire.decisions)
    assert set(wire.decisions[-1].plan.to_dict().values()) == {"raw()"}
    # Rank 0 decides, and says why.
    assert logged == ([] if rank else [f"step {d.step}: {d.note}" for d in wire.decisions])


@on_ranks(2)
def test_resumes_between_asking_and_deciding(rank: int) -> None:
    torch.set_num_threads(1)
    model = wrapped(0.01)
    wire = thinwire.compress(model, OPTIONS)
    # The decision of step 13 is asked for in step 11.
    advance(model, rank, 0, 12)
    saved = copy.deepcopy({"wire": wire.state_dict(), "model": model.module.state_dict()})
    advance(model, rank, 12, 6)
    again = wrapped(0.01)
    again.module.load_state_dict(saved["model"])
    resumed = thinwire.compress(again, OPTIONS)
    resumed.load_state_dict(saved["wire"])
    advance(again, rank, 12, 6)
    assert fingerprint(again) == fingerprint(model)
    assert [d.step for d in wire.decisions] == [5, 13]
    assert [(d.step, d.plan.hash) for d in resumed.decisions] == [(13, wire.decisions[-1].plan.hash)]
    assert resumed.decisions[-1].note.startswith("off: a step takes")


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_is_on_over_a_slow_link() -> None:
    with lab.Network(2, rate="20mbit") as network:
        answer = run_in(train, {}, 2, network)
    first, second = answer["decisions"]
    assert (first["step"], second["step"]) == (6, 18)
    assert first["note"].startswith("on: a step takes")
    plan = json.loads(first["plan"])
    assert all(plan[name] != "raw()" for name in ("first.weight", "second.weight"))
    assert plan["first.bias"] == "raw()"
    assert answer["plans"][0] == answer["plans"][1]
    assert answer["stats"]["compressed_steps"] == 14
    # 6 of 20 steps are exact, and probes are not counted.
    assert answer["stats"]["payload_sent_bytes"] < 0.6 * answer["stats"]["dense_bytes"]
