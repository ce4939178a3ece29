"""Plans that change while a model trains: when, on all ranks alike, and what survives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire
from harness import on_ranks, on_threads, run_threads
from nets import assert_replicas_identical, fingerprint, make, train, trained
from thinwire.collectives import ScatterReduceAllGather
from thinwire.plan import Plan
from thinwire.policies import Evidence, LGreco, Policy, Proposal, Sync
from thinwire.runtime import BucketEngine, DisagreementError, Wire, WireSettings
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.probe import settle
from thinwire.runtime.slots import Slots
from thinwire_tools.compare.plan_plot import draw

SHAPES = {"w": (64, 48), "v": (48, 48), "b": (10,)}
LAYERS = tuple(SHAPES.items())
NUMEL = 64 * 48 + 48 * 48 + 10


@dataclass(frozen=True, kw_only=True)
class Scripted(Policy):
    """Takes one spec after the other, and notes what it was shown."""

    specs: tuple[str, ...] = ("minmax(bits=2)",)

    def propose(self, evidence: Evidence) -> Proposal:
        seen.append(evidence)
        spec = self.specs[(evidence.step // self.every) % len(self.specs)]
        if spec == "fail":
            raise RuntimeError("no idea")
        if spec == "nothing":
            return None  # pyright: ignore[reportReturnType]
        return Proposal({name: thinwire.parse(spec) for name in evidence.reference})


seen: list[Evidence] = []


def wires(policy: Policy, spec: str, steps: int, *, start: int = 0, num_ranks: int = 2, loss_scale: float = 1.0):
    """By rank, the Wire after some steps, and what arrived in each."""
    seen.clear()

    def run(transport):
        wire = Wire(BucketEngine(Plan.build(SHAPES, spec), SHAPES, transport, WireSettings(adapt=policy, start=start)))
        arrived = []
        for step in range(steps):
            wire.engine.begin_step()
            flat = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + wire.rank)) * loss_scale
            arrived.append(wire.engine.reduce(flat, LAYERS, loss_scale=loss_scale).wait())
        return wire, arrived

    return run_threads(run, num_ranks)


def test_all_ranks_change_over_between_the_same_two_steps() -> None:
    policy = Scripted(every=4, window=2, lag=1, specs=("minmax(bits=4)", "minmax(bits=2)", "minmax(bits=8)"))
    answers = wires(policy, "minmax(bits=4)", 10, num_ranks=3)
    for wire, arrived in answers:
        assert [(d.step, d.changed) for d in wire.decisions] == [(4, 2), (8, 2)]
        assert wire.plan["w"] == thinwire.compressors.MinMax(bits=8)
        assert wire.plan["b"] == thinwire.compressors.Raw()
        assert wire.stats.plan_changes == 2
        assert all(torch.equal(mine, first) for mine, first in zip(arrived, answers[0][1], strict=True))
        # What is received has as many levels a bucket as the plan's bits give.
        assert [len(arrived[step][:128].unique()) <= 4 for step in (3, 4, 7, 8)] == [False, True, True, False]


def test_what_a_policy_is_shown() -> None:
    wires(Scripted(every=5, window=2, lag=2), "minmax(bits=4)", 6, loss_scale=256.0)
    (evidence,) = seen
    exact = sum(torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step)) for step in (1, 2))
    assert torch.allclose(evidence.gradients["w"].view(-1), exact[: 64 * 48], atol=1e-4)
    assert set(evidence.gradients) == {"w", "v"}
    assert evidence.gradients["v"].shape == (48, 48)
    assert evidence.step == 5
    assert evidence.bucket_of == {"w": 0, "v": 0, "b": 0}


def test_after_a_dense_warm_up_the_first_compressed_step_has_a_plan_already() -> None:
    for wire, _ in wires(Scripted(every=6, window=2, lag=1), "minmax(bits=4)", 5, start=4):
        assert [d.step for d in wire.decisions] == [4]
        assert wire.plan["w"] == thinwire.compressors.MinMax(bits=2)
        assert wire.stats.compressed_steps == 1


FIVE = dict.fromkeys("abcde", (64, 48))


def timed_run(policy: Policy, steps: int) -> Adapter:
    """The decisions for five buckets of one layer each, where a byte of the third takes ten times as long."""

    def run(transport):
        plan = Plan.build(FIVE, "minmax(bits=4)")
        algorithm, world = settle(ScatterReduceAllGather(), transport)
        adapter = Adapter(policy, plan, FIVE, transport, algorithm=algorithm, world=world, start=0)
        draw = torch.Generator().manual_seed(0)
        for step in range(steps):
            plan = adapter.begin_step(step, plan, None)
            if adapter.watches(step):
                for at, (name, shape) in enumerate(FIVE.items()):
                    flat = torch.randn(64 * 48, generator=draw) * 2.0**at
                    adapter.observe(flat, ((name, shape),), step, 1.0)
            sizes = tuple(int(plan[name].wire_bytes(shape)) for name, shape in FIVE.items())
            seconds = 1e-6 * sum(size * (10 if at == 2 else 1) for at, size in enumerate(sizes))
            adapter.note_sync(Sync(sizes, seconds))
        return adapter

    return run_threads(run, 1)[0]


def test_plans_are_tried_until_the_times_of_buckets_are_known_and_never_again() -> None:
    """At the default interval, with more buckets than 4096 steps have plans for."""
    adapter = timed_run(LGreco(objective="time"), 9_000)
    steps, notes = [d.step for d in adapter.decisions], [d.note for d in adapter.decisions]
    tried = sum("tried" in note for note in notes)
    assert 9 <= tried <= 20
    assert steps[: tried + 1] == [500 + 50 * k for k in range(tried + 1)]
    assert not any(step % 500 for step in steps[tried + 1 :])
    assert not any("tried" in note for note in notes[tried:])
    last = adapter.decisions[-1].plan
    least = min(FIVE, key=lambda name: last[name].wire_bytes(FIVE[name]))
    assert least == "c"


def test_plans_that_are_all_alike_are_not_tried_for_ever() -> None:
    adapter = timed_run(LGreco(objective="time", every=60, bounds=(4, 4), window=2, lag=2), 1_500)
    notes = [d.note for d in adapter.decisions]
    assert sum("of those tried" in note for note in notes) == 20
    assert "all bytes count alike" in notes[-1]


@on_threads(1)
def test_simulated_communication_takes_no_time_to_measure(transport) -> None:
    settings = WireSettings(adapt=LGreco(objective="time"))
    with pytest.raises(ValueError, match="simulate=True has none: leave out objective=time"):
        Wire(BucketEngine(Plan.build(SHAPES), SHAPES, transport, settings, simulated=True))


def test_a_policy_that_fails_or_proposes_nothing_costs_nothing_but_its_plan() -> None:
    specs = ("", "fail", "nothing", "minmax(bits=2)")
    for wire, _ in wires(Scripted(every=3, window=1, lag=1, specs=specs), "minmax", 10):
        assert [d.changed for d in wire.decisions] == [0, 0, 2]
        assert "no idea" in wire.decisions[0].note
        assert "the policy failed" in wire.decisions[1].note
        assert wire.plan["w"] == thinwire.compressors.MinMax(bits=2)


def test_a_nonfinite_gradient_is_left_out_of_the_sum() -> None:
    seen.clear()

    def run(transport):
        wire = Wire(
            BucketEngine(Plan.build(SHAPES), SHAPES, transport, WireSettings(adapt=Scripted(every=4, window=3, lag=1)))
        )
        for step in range(4):
            wire.engine.begin_step()
            flat = torch.full((NUMEL,), 1.0 if step != 1 else float("inf"))
            wire.engine.reduce(flat, LAYERS).wait()
        wire.engine.begin_step()

    run_threads(run, 2)
    assert float(seen[0].gradients["w"].max()) == 2.0


def test_what_rank_0_sends_is_read_and_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in (
        "nonsense",
        "[]",
        '{"layers": {"w": "nonsense"}, "note": ""}',
        '{"layers": {"other": "minmax"}, "note": ""}',
        '{"layers": 3, "note": ""}',
        '{"layers": {"v": "powersgd(rank=40)"}, "note": ""}',
    ):
        monkeypatch.setattr("thinwire.runtime.adapt.exchange_texts", lambda mine, transport, told=told: [told] * 2)
        with pytest.raises(DisagreementError, match="rank 0 sent a plan"):
            wires(Scripted(every=2, window=1, lag=1), "minmax", 3)


def _sums(wire: Wire, shapes: dict[str, tuple[int, ...]], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All that arrives in so many steps of random gradients, and all that this rank sent."""
    layers = tuple(shapes.items())
    arrived, sent = torch.zeros(2, sum(math.prod(shape) for shape in shapes.values()), dtype=torch.float64)
    for step in range(num_steps):
        wire.engine.begin_step()
        flat = torch.randn(sent.numel(), generator=torch.Generator().manual_seed(10 * step + wire.rank))
        sent += flat
        arrived += wire.engine.reduce(flat, layers).wait()
    return arrived, sent


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ef(minmax(bits=2))", "ef(minmax(bits=4))"),
        ("ef(minmax(bits=2, bucket=64))", "ef(minmax(bits=2, bucket=1024))"),
        ("ef(minmax(bits=2))", "ef(topk(density=0.1))"),
        ("ef(topk(density=0.1))", "ef(minmax(bits=2))"),
        ("ef(minmax(bits=2))", "ef(powersgd(rank=2))"),
        ("ef(powersgd(rank=4))", "ef(minmax(bits=3))"),
    ],
)
def test_the_residual_stays(old: str, new: str) -> None:
    """All that arrives, and the residual in the end, is all that was given: to the last bit that fp32 has."""
    num_ranks = 3
    policy = Scripted(every=4, window=1, lag=1, specs=(old, new))
    shapes = {"w": (64, 48)}

    def run(transport):
        wire = Wire(BucketEngine(Plan.build(shapes, old), shapes, transport, WireSettings(adapt=policy)))
        arrived, sent = _sums(wire, shapes, 7)
        assert wire.plan["w"] == thinwire.parse(new)
        # One more change, back to what every rank has a residual of its own for: it holds what this rank has not sent.
        residual = wire.state_dict()[f"rank{wire.rank}/residual/w"].double().view(-1)
        return arrived, sent, residual, wire

    answers = run_threads(run, num_ranks)
    mean = sum(sent for _, sent, _, _ in answers) / num_ranks
    unsent = torch.zeros_like(mean)
    for rank, (_, _, residual, wire) in enumerate(answers):
        slots, each, last = Slots(), [1] * num_ranks, thinwire.parse("ef(topk(density=0.5))")
        slots.replace({("w", "residual"): residual.float()})
        slots.hand_over("w", shapes["w"], wire.plan["w"], last, rank, each, each)
        unsent += slots.value("w", thinwire.parse("ef(topk)").slots[-1], shapes["w"]).double() / num_ranks
    assert torch.allclose(answers[0][0] + unsent, mean, atol=1e-4)
    assert float(unsent.abs().max()) > 0.01


def test_another_family_is_handed_the_mean_residual_and_not_how_ranks_differ() -> None:
    """PowerSGD's residuals grow apart where ranks differ; the first top-k message shows their mean all the same."""
    shapes = {"w": (64, 48)}
    policy = Scripted(every=40, window=1, lag=1, specs=("ef(powersgd(rank=2))", "ef(topk(density=0.1))"))
    draw = torch.Generator().manual_seed(0)
    shared, apart = torch.randn(2, 64 * 48, generator=draw)

    def run(transport):
        wire = Wire(BucketEngine(Plan.build(shapes, policy.specs[0]), shapes, transport, WireSettings(adapt=policy)))
        unsent = torch.zeros(64 * 48)
        while True:
            wire.engine.begin_step()
            flat = shared + (apart if wire.rank else -apart)
            unsent += shared
            arrived = wire.engine.reduce(flat, tuple(shapes.items())).wait()
            if wire.plan["w"] == thinwire.parse(policy.specs[1]):
                return float(torch.cosine_similarity(arrived, unsent, dim=0))
            unsent -= arrived

    (first, second) = run_threads(run, 2)
    assert first == second > 0.6


def test_a_layer_that_turns_raw_sends_its_residual_first() -> None:
    """All that was sent has arrived after one step of ``ef(raw)``; a plain raw layer would lose the residual."""
    shapes = {"w": (64, 48)}
    policy = Scripted(every=4, window=1, lag=1, specs=("ef(topk(density=0.1))", "ef(raw)", "raw"))

    def run(transport):
        wire = Wire(BucketEngine(Plan.build(shapes, policy.specs[0]), shapes, transport, WireSettings(adapt=policy)))
        arrived, sent = _sums(wire, shapes, 10)
        assert wire.plan["w"] == thinwire.compressors.Raw()
        return arrived, sent

    (arrived, mine), (_, other) = run_threads(run, 2)
    assert torch.allclose(arrived, (mine + other) / 2, atol=1e-4)


def _arrives_in_all(rank: int, spec: str, loss_scale: float, infinite: tuple[int, ...] = ()) -> None:
    """All means of ten steps of DDP on a loss that is linear in its weights are the gradients of both ranks.

    In the steps ``infinite`` a gradient of rank 0 is infinite: they are skipped, and count neither as sent nor as
    arrived. They must be the first without compression.
    """
    policy = Scripted(every=4, window=1, lag=1, specs=(spec, "raw", "raw"))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 48, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, enabled=loss_scale != 1.0)
    options = {"optimizer": optimizer, "grad_scaler": scaler}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wire = thinwire.compress(model, spec, adapt=policy, skip_if_slower=False, **options)
    (weight,) = model.parameters()
    arrived, given = torch.zeros(2, 48, 64, dtype=torch.float64)
    for step in range(10):
        direction = torch.randn(48, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        if step in infinite and rank == 0:
            direction[1, 2] = torch.inf
        was_dense = wire.engine.dense
        model.zero_grad()
        scaler.scale((model(torch.eye(64)).T * direction).sum()).backward()
        assert weight.grad is not None
        if step in infinite:
            assert wire.engine.dense
            assert was_dense == (step > infinite[0])
            assert not bool(weight.grad.isfinite().all())
            continue
        arrived += weight.grad / loss_scale
        given += direction
    assert wire.engine.dense
    dist.all_reduce(given)
    assert torch.allclose(arrived, given / 2, atol=1e-4), spec


@on_ranks(2)
def test_the_residual_is_sent_with_the_first_gradient_after_compression_is_switched_off(rank: int) -> None:
    """`Auto` turns all layers raw at once, and gradients go by a native all-reduce from then on."""
    _arrives_in_all(rank, "ef(topk(density=0.1))", 1.0)
    _arrives_in_all(rank, "ef(minmax(bits=2))", 1024.0)
    _arrives_in_all(rank, "ef(powersgd(rank=2))", 1.0)
    _arrives_in_all(rank, "ef(topk(density=0.1), units=update)", 1.0)
    # Again if the step that they went with was skipped.
    _arrives_in_all(rank, "ef(topk(density=0.1))", 1024.0, (4, 5))


def test_a_layer_that_the_rank_does_not_suit_gets_a_lower_one() -> None:
    shapes = {"large": (256, 256), "conv": (16, 16, 3, 3)}
    layers = tuple(shapes.items())

    def run(transport):
        plan = Plan.build(shapes, "powersgd(rank=16)")
        assert plan["conv"] == thinwire.compressors.Raw()
        policy = thinwire.policies.LGreco(every=4, window=2, lag=1, alpha=2.0)
        wire = Wire(BucketEngine(plan, shapes, transport, WireSettings(adapt=policy)))
        for step in range(6):
            wire.engine.begin_step()
            draw = torch.Generator().manual_seed(10 * step + wire.rank)
            low_rank = torch.randn(16, 1, generator=draw) @ torch.randn(1, 144, generator=draw)
            flat = torch.cat([torch.randn(256 * 256, generator=draw), low_rank.view(-1)])
            wire.engine.reduce(flat, layers).wait()
        state = wire.state_dict()
        wire.load_state_dict(state)
        return str(wire.plan["conv"]), wire.decisions[0].note

    (first, note), (second, _) = run_threads(run, 2)
    assert first == second
    assert first.startswith("ef(powersgd(rank="), note


def test_low_rank_factors_keep_their_columns() -> None:
    policy = Scripted(every=4, window=1, lag=1, specs=("powersgd(rank=2)", "powersgd(rank=4)", "powersgd(rank=1)"))
    shapes, changes = {"w": (64, 48)}, []

    def run(transport):
        wire = Wire(BucketEngine(Plan.build(shapes, policy.specs[0]), shapes, transport, WireSettings(adapt=policy)))
        before = torch.empty(0)
        for step in range(9):
            wire.engine.begin_step()
            if wire.rank == 0 and step in (4, 8):
                changes.append((before, wire.state_dict()["rank0/q/w"]))
            flat = torch.randn(64 * 48, generator=torch.Generator().manual_seed(step + wire.rank))
            wire.engine.reduce(flat, tuple(shapes.items())).wait()
            before = wire.state_dict()[f"rank{wire.rank}/q/w"]

    run_threads(run, 2)
    (two, four), (of_four, one) = changes
    assert [q.shape[1] for q in (two, four, of_four, one)] == [2, 4, 4, 1]
    assert torch.equal(four[:, :2], two)
    assert bool(four[:, 2:].any(0).all())
    assert torch.equal(one, of_four[:, :1])


LGRECO = "lgreco(every=4, window=2, lag=1)"


def _norms(errors: Mapping[str, float]) -> float:
    return sum(error**0.5 for error in errors.values())


def _adapts(rank: int, spec: str, policy: str, simulate: bool = False) -> Wire:
    model = make(rank)
    wire = thinwire.compress(model, spec, adapt=policy, skip_if_slower=False, simulate=simulate)
    train(model, rank, 10)
    assert_replicas_identical(model)
    plans: list[object] = [None] * 2
    dist.all_gather_object(plans, [d.plan.hash for d in wire.decisions])
    assert plans[0] == plans[1]
    return wire


@on_ranks(2)
def test_lgreco_sends_less_at_no_more_error(rank: int) -> None:
    for i, spec in enumerate(("minmax(bits=4)", "topk(density=0.1)", "powersgd(rank=8)", "rangefloat(bits=8)")):
        simulate = i % 2 == 1
        wire = _adapts(rank, spec, LGRECO, simulate)
        assert [d.step for d in wire.decisions] == [4, 8]
        for d in wire.decisions:
            error, most = _norms(d.errors), _norms(d.reference_errors)
            assert (error, most) == (0, 0) if rank else 0 < error <= most * (1 + 1e-9) or d.note, d.note
        assert rank or wire.stats.adapt_s > 0
        uniform = _adapts(rank, spec, "lgreco(every=1000)", simulate)
        assert wire.stats.payload_sent_bytes <= uniform.stats.payload_sent_bytes


@on_ranks(2)
def test_every_policy_trains(rank: int) -> None:
    for policy in (
        "lgreco(every=4, objective=time)",
        "lgreco(every=4, objective=link)",
        "lgreco(every=4, reference=accordion())",
        "kmeans(every=4)",
        "accordion(every=4)",
    ):
        wire = _adapts(rank, "minmax(bits=4)", policy)
        assert [d.step for d in wire.decisions] == [4, 8]
        assert not any("failed" in d.note for d in wire.decisions)
    families = ("minmax(bits=4)", "topk(density=0.1)", "powersgd(rank=4)")
    wire = _adapts(rank, "minmax(bits=4)", f"lgreco(every=4, window=2, lag=1, families={families!r})")
    assert all(str(c).startswith(("ef(", "raw()")) for c in wire.plan.layers.values())
    with pytest.raises(ValueError, match=r"natural.* has no bits, rank, density"):
        thinwire.compress(make(rank), "natural()", adapt="lgreco()", skip_if_slower=False)


@pytest.mark.parametrize("at", [5, 7, 8])
@on_ranks(2)
def test_a_run_that_resumes_decides_as_it_would_have(rank: int, at: int, tmp_path: Path) -> None:
    """Saved before, amid and after a decision's steps."""
    policy = "lgreco(every=4, window=2, lag=2, reference=accordion(eta=0.1))"

    def begin():
        model = make(rank)
        optimizer = torch.optim.SGD(trained(model), lr=0.05)
        wire = thinwire.compress(model, "powersgd(rank=4)", adapt=policy, skip_if_slower=False, optimizer=optimizer)
        return model, wire, optimizer

    model, wire, optimizer = begin()
    train(model, rank, at, optimizer=optimizer)
    # What DDP's first buckets looked like is no part of a checkpoint.
    dcp.save({"model": model.module.state_dict(), "wire": wire.state_dict()}, checkpoint_id=tmp_path)
    train(model, rank, 13 - at, first=at, optimizer=optimizer)
    straight = fingerprint(model)
    model, wire, optimizer = begin()
    saved = {"wire": {"plan": wire.state_dict()["plan"]}}
    dcp.load(saved, checkpoint_id=tmp_path)
    state = {"model": model.module.state_dict(), "wire": wire.state_dict_template(2, saved["wire"])}
    dcp.load(state, checkpoint_id=tmp_path)
    model.module.load_state_dict(state["model"])
    wire.load_state_dict(state["wire"])
    train(model, rank, 13 - at, first=at, optimizer=optimizer)
    assert fingerprint(model) == straight


@on_ranks(2)
def test_the_present_plan_is_shown_drawn_and_taken_again(rank: int, tmp_path: Path) -> None:
    model = make(rank)
    wire = thinwire.compress(model, "topk(density=0.1)", adapt=LGRECO, skip_if_slower=False)
    train(model, rank, 6)
    found, specs = wire.engine.plan_rows(), wire.plan.to_dict()
    rows = {row.name: row for row in found}
    assert {name: str(row.compressor) for name, row in rows.items()} == specs
    # DDP reduces the last layers first.
    assert rows["layers.3.weight"].bucket < rows["embed.weight"].bucket
    assert rank or 0 < sum(row.error or 0 for row in found) <= sum(row.reference_error or 0 for row in found)
    if rank == 0 and find_spec("matplotlib"):
        draw(wire, tmp_path / "plan.svg")
        picture = (tmp_path / "plan.svg").read_text()
        assert picture.startswith("<?xml")
        for text in ("layers.3.weight", "bits sent an element", "MB sent a step", "chosen", "reference"):
            assert f"<!-- {text}" in picture
    wire.detach()
    assert thinwire.compress(model, specs, skip_if_slower=False).plan.to_dict() == specs
