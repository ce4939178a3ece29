"""Compressed pipelines under PyTorch's schedules: what both sides keep, what training and evaluation see."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage

import thinwire
from harness import run_ranks
from pipelines import BATCH, CHUNKS, LENGTH, MULTI, SAMPLES, SINGLE, WIDTH, Block, Pipe, check_sides, samples

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}


def train(rank: int, num_ranks: int, name: str, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train, and tell everything: losses, what is kept, statistics, parameters."""
    pipe = Pipe(rank, num_ranks, name, **options)
    x, y = samples()
    losses = [loss for epoch in range(epochs) for loss in pipe.epoch(epoch, x, y)]
    return {
        "losses": losses,
        "digests": pipe.digests(),
        "stats": [stage.stats for stage in pipe.stages],
        "parameters": pipe.parameters(),
    }


def trainings(rank: int, name: str, epochs: int, several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is told of each of several trainings of two ranks, one after the other."""
    return [train(rank, 2, name, epochs, options) for options in several]


def losses_of(answers: list[dict[str, Any]]) -> list[float]:
    return next(answer["losses"] for answer in answers if answer["losses"])


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_both_sides_keep_the_same_under_every_schedule(name: str) -> None:
    answers = run_ranks(train, 2, 2, name, 3, FW3_BW6)
    boundaries = {"zbv": [0, 2]}.get(name, [0] if name in SINGLE else [0, 1, 2])
    check_sides([answer["digests"] for answer in answers], boundaries)
    stats = [s for answer in answers for s in answer["stats"]]
    steps = 3 * SAMPLES // BATCH
    assert all(s.steps == steps and s.evaluations == 0 for s in stats)
    assert not any(s.resets or s.corrupt or s.nonfinite or s.evicted for s in stats)
    losses = losses_of(answers)
    assert len(losses) == steps
    assert losses[-1] < losses[0]


def test_1f1b_trains_as_gpipe_does_to_the_bit() -> None:
    one, other = (run_ranks(train, 2, 2, name, 2, FW3_BW6) for name in SINGLE)
    assert losses_of(one) == losses_of(other)
    assert [a["digests"] for a in one] == [a["digests"] for a in other]


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_raw_trains_as_pytorch_does_to_the_bit(name: str) -> None:
    plain = run_ranks(train_with_pytorch, 2, 2, name)
    raw = run_ranks(train, 2, 2, name, 2, {"forward": "raw", "backward": "raw"})
    assert losses_of(raw) == losses_of(plain)
    for mine, theirs in zip(raw, plain, strict=True):
        for p, q in zip(mine["parameters"], theirs["parameters"], strict=True):
            assert torch.equal(p, q)


def train_with_pytorch(rank: int, num_ranks: int, name: str) -> dict[str, Any]:
    pipe = Pipe(rank, num_ranks, name, compress=lambda stage: stage)
    x, y = samples()
    losses = []
    for epoch in range(2):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        found = [pipe.step(x[ids], y[ids], None) for ids in order.split(BATCH)]
        losses += [loss for loss in found if loss is not None]
    return {"losses": losses, "parameters": pipe.parameters()}


FROZEN = {"gpipe": [{0}, {1}, {2}, {0, 1}], "1f1b": [{0, 1}], "interleaved": [{0, 1, 2}], "zero bubble": [{0}]}


def frozen(rank: int, num_ranks: int, name: str) -> list[tuple[Any, ...]]:
    """By frozen stages and compressors (None: PyTorch's own stages): losses, parameters, bytes sent back by stage."""
    x, y = samples()
    found = []
    for stages in FROZEN[name]:
        for forward in (None, "raw", "maxabs(bits=8)", "delta(maxabs(bits=4))"):
            compressors = {"forward": forward, "backward": "raw" if forward == "raw" else "maxabs(bits=8)"}
            how = compressors if forward else {"compress": lambda stage: stage}
            pipe = Pipe(rank, num_ranks, name, **how)
            for index, module in zip(pipe.indices, pipe.modules, strict=True):
                module.requires_grad_(index not in stages)
            losses = [pipe.step(x[:BATCH], y[:BATCH], range(BATCH) if forward else None) for _ in range(3)]
            stats = {s.stage_index: s.stats.backward_sent_bytes for s in pipe.stages if forward}
            found.append((losses, pipe.parameters(), stats))
    return found


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_stages_train_as_pytorchs_do(name: str) -> None:
    num_ranks = 3 if name in SINGLE else 2
    answers = run_ranks(frozen, num_ranks, num_ranks, name, group_timeout_s=8)
    for i, stages in enumerate(FROZEN[name]):
        sent: dict[int, int] = {}
        for answer in answers:
            plain, raw, *compressed = answer[4 * i : 4 * i + 4]
            assert plain[0] == raw[0]
            assert all(torch.equal(p, q) for p, q in zip(plain[1], raw[1], strict=True))
            assert all(losses[0] is None or losses[-1] < losses[0] for losses, *_ in compressed)
            sent |= compressed[0][2]
        # Gradients go back to the first stage that trains, and no further.
        first = next(stage for stage in sorted(sent) if stage not in stages)
        assert [stage for stage in sent if sent[stage]] == [stage for stage in sent if stage > first]


def test_changes_train_where_activations_of_the_same_bits_do_not() -> None:
    several = [
        {"forward": forward, "backward": "maxabs(bits=6)", "lr": 1.0}
        for forward in ("raw", "delta(maxabs(bits=3))", "direct(maxabs(bits=3))")
    ]
    answers = zip(*run_ranks(trainings, 2, "interleaved", 25, several), strict=True)
    raw, delta, direct = (sum(losses_of(list(of))[-4:]) / 4 for of in answers)
    assert delta < 1.1 * raw
    assert direct > 1.8 * raw


def test_statistics_show_changes_shrink_and_bytes_add_up() -> None:
    answers = run_ranks(train, 2, 2, "gpipe", 8, {**FW3_BW6, "lr": 0.05})
    earlier, later = (answer["stats"][0] for answer in answers)
    numel, steps = LENGTH * WIDTH, 8 * SAMPLES // BATCH
    assert [epoch.samples for epoch in earlier.epochs] == [SAMPLES] * 8
    assert earlier.epochs[0].delta == 0
    assert all(0.1 < epoch.activation < 10 for epoch in earlier.epochs)
    deltas = [epoch.delta for epoch in earlier.epochs[1:]]
    assert deltas[-1] < deltas[0] < 0.3 * earlier.epochs[1].activation
    assert later.epochs == []
    forward, backward = (thinwire.parse(f"maxabs(bits={bits})").wire_bytes((numel,)) for bits in (3, 6))
    per_step = CHUNKS * 64 + BATCH * forward
    assert earlier.forward_sent_bytes == 2 * (CHUNKS * 64 + BATCH * 4 * numel) + (steps - 2) * per_step
    assert later.backward_sent_bytes == steps * (CHUNKS * 64 + BATCH * backward)
    assert earlier.received_bytes == later.backward_sent_bytes
    assert later.received_bytes == earlier.forward_sent_bytes
    assert earlier.dense_bytes == later.dense_bytes == steps * BATCH * numel * 4
    assert earlier.kept_samples == later.kept_samples == SAMPLES
    assert earlier.store_bytes == SAMPLES * numel * 4
    assert earlier.saved_bytes == earlier.dense_bytes - earlier.sent_bytes
    assert str(earlier).startswith("16 steps, ")
    assert earlier.to_dict()["ratio"] == earlier.ratio > 1
    assert min(earlier.encode_s, earlier.decode_s, earlier.store_s, earlier.agree_s, later.decode_s) > 0


def dropped_out(rank: int, dropout: float, warmup: int) -> tuple[list[str], list[float]]:
    """Warnings of a training with dropout before the boundary, and by visit the share by which activations change."""
    pipe = Pipe(rank, 2, **FW3_BW6, warmup_epochs=warmup, wrap=lambda m: nn.Sequential(m, nn.Dropout(dropout)), lr=0.05)
    x, y = samples()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(6):
            pipe.epoch(epoch, x, y)
    texts = [str(w.message) for w in caught if "between two visits" in str(w.message)]
    return texts, [epoch.share for epoch in pipe.stages[0].stats.epochs]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_changes_that_stay_large_are_said_once(dropout: float, warmup: int) -> None:
    (texts, shares), (others, _) = run_ranks(dropped_out, 2, dropout, warmup)
    assert not others
    assert shares[: max(warmup, 1)] == [0] * max(warmup, 1)
    if not dropout:
        assert not texts
        return
    assert shares[-1] > 0.3
    (text,) = texts
    assert "boundary 0" in text
    assert "p=0" in text


def warmed_up(rank: int, warmup: int) -> tuple[list[int], list[int]]:
    pipe = Pipe(rank, 2, **FW3_BW6, warmup_epochs=warmup, precision=8)
    x, y = samples()
    sent = []
    for epoch in range(4):
        before = pipe.stages[0].stats.sent_bytes
        pipe.epoch(epoch, x, y)
        sent.append(pipe.stages[0].stats.sent_bytes - before)
    return sent, list(pipe.digests().values())


def test_a_warm_up_is_uncompressed_both_ways() -> None:
    raw = 2 * CHUNKS * 64 + SAMPLES * LENGTH * WIDTH * 4
    for warmup in (0, 1, 2):
        (forward, kept), (backward, also_kept) = run_ranks(warmed_up, 2, warmup)
        assert kept == also_kept
        # A first visit is whole in any case, in however few bits it is kept.
        assert [sent == raw for sent in forward] == [epoch < max(warmup, 1) for epoch in range(4)]
        assert [sent == raw for sent in backward] == [epoch < warmup for epoch in range(4)]
        assert forward[max(warmup, 1) :] == [forward[-1]] * (4 - max(warmup, 1))
    assert forward[-1] < 0.4 * raw


def warmed_up_with_little_room(rank: int) -> list[int]:
    room = thinwire.store.Memory(budget_bytes=4 * LENGTH * WIDTH * 4)
    pipe = Pipe(rank, 2, **FW3_BW6, warmup_epochs=1, store=room)
    x, y = samples()
    sent = []
    for epoch in range(3):
        before = pipe.stages[0].stats.backward_sent_bytes
        pipe.epoch(epoch, x, y)
        sent.append(pipe.stages[0].stats.backward_sent_bytes - before)
    return sent


def test_samples_without_room_are_not_warmed_up_for_ever() -> None:
    headers, raw = 2 * CHUNKS * 64, LENGTH * WIDTH * 4
    coded = thinwire.parse("maxabs(bits=6)").payload_bytes(LENGTH * WIDTH, torch.float32)
    backward = run_ranks(warmed_up_with_little_room, 2)[1]
    assert backward == [headers + 4 * raw + 12 * coded, *[headers + 16 * coded] * 2]


@pytest.mark.parametrize("warmup", [0, 1])
def test_first_visits_compute_on_activations_and_not_on_what_is_kept_of_them(warmup: int) -> None:
    options = {
        "forward": FW3_BW6["forward"],
        "warmup_epochs": warmup,
        "backward": FW3_BW6["backward"] if warmup else "raw",
    }
    first = run_ranks(train, 2, 2, "gpipe", 1, {**options, "precision": 2})
    raw = run_ranks(train, 2, 2, "gpipe", 1, {"forward": "raw", "backward": "raw"})
    assert losses_of(first) == losses_of(raw)


def test_messages_may_be_kept_in_fewer_bits(tmp_path) -> None:
    several = [
        {**FW3_BW6, "precision": precision, "store": store, "check_every": 1}
        for precision in (16, 8, 4)
        for store in (thinwire.store.Memory(), thinwire.store.Disk(tmp_path / str(precision), num_samples=SAMPLES))
    ]
    full, *found = zip(*run_ranks(trainings, 2, "1f1b", 3, [FW3_BW6, *several]), strict=True)
    for options, answers in zip(several, found, strict=True):
        check_sides([answer["digests"] for answer in answers], [0])
        assert not any(answer["stats"][0].resets for answer in answers)
        expected = pytest.approx(losses_of(list(full))[-1], rel=0.1 if options["precision"] > 4 else 0.6)
        assert losses_of(list(answers))[-1] == expected


def half(rank: int, dtype: torch.dtype) -> Any:
    pipe = Pipe(rank, 2, **FW3_BW6, precision=16, wrap=lambda module: module.to(dtype))
    x, y = (t.to(dtype) for t in samples())
    losses = [loss for epoch in range(3) for loss in pipe.epoch(epoch, x, y)]
    return pipe.digests(), losses, pipe.stages[0].stats


@pytest.mark.parametrize("name", ["gpipe", "zero bubble"])
def test_cluster_centres_train_and_take_no_more_memory_for_more_samples(name: str) -> None:
    options = {**FW3_BW6, "store": thinwire.store.Centres(num=8), "check_every": 2}
    answers = run_ranks(train, 2, 2, name, 3, options)
    check_sides([answer["digests"] for answer in answers], [0] if name == "gpipe" else [0, 1, 2])
    sides = 1 if name == "gpipe" else 2
    losses = losses_of(answers)
    assert losses[-1] < losses[0]
    for stats in (s for answer in answers for s in answer["stats"]):
        assert stats.store_bytes in (thinwire.store.centre_bytes(8, (LENGTH, WIDTH)) * n for n in range(1, sides + 1))
        assert not stats.kept_samples
        assert not stats.resets
        if stats.epochs:
            assert 0 < stats.epochs[1].delta < stats.epochs[1].activation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    (mine, _, stats), (theirs, losses, _) = run_ranks(half, 2, dtype)
    check_sides([mine, theirs], [0])
    assert losses[-1] < losses[0]
    assert stats.dense_bytes == 3 * SAMPLES * LENGTH * WIDTH * 2


def last_batches(rank: int, batch: int) -> Any:
    pipe = Pipe(rank, 2, **FW3_BW6, chunks=3)
    x, y = samples()
    losses = [loss for epoch in range(3) for loss in pipe.epoch(epoch, x, y, batch=batch)]
    return pipe.digests(), losses


@pytest.mark.parametrize("batch", [13, 9, 12])
def test_a_smaller_last_batch(batch: int) -> None:
    """16 samples in batches of 13, 9 or 12: the last has 3, 7 or 4, in 3 micro-batches of sizes that differ."""
    (mine, _), (theirs, losses) = run_ranks(last_batches, 2, batch)
    check_sides([mine, theirs], [0])
    assert losses[-1] < losses[1]


def evaluated(rank: int, options: dict[str, Any]) -> Any:
    pipe = Pipe(rank, 2, **options)
    x, y = samples()
    pipe.epoch(0, x, y)
    before = pipe.digests()
    found = [pipe.eval(x[:BATCH], y[:BATCH]), pipe.eval(x[3:9], y[3:9], ids=range(3, 9))]
    assert pipe.digests() == before
    pipe.epoch(1, x, y)
    stats = pipe.stages[0].stats
    return found, pipe.digests(), pipe.parameters(), (stats.steps, stats.evaluations)


def test_evaluation_leaves_messages_alone_and_sees_the_model_itself() -> None:
    (_, mine, first, counts), (found, theirs, second, _) = run_ranks(evaluated, 2, FW3_BW6)
    check_sides([mine, theirs], [0])
    assert counts == (4, 2)
    without = run_ranks(train, 2, 2, "gpipe", 2, FW3_BW6)
    assert [answer["digests"] for answer in without] == [mine, theirs]
    assert all(torch.equal(p, q) for p, q in zip(second, without[1]["parameters"], strict=True))
    assert all(torch.equal(p, q) for p, q in zip(first, without[0]["parameters"], strict=True))
    # Evaluated after the first epoch: that is what a run of one epoch ends with.
    once = run_ranks(train, 2, 2, "gpipe", 1, FW3_BW6)
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for p, q in zip(model.parameters(), [p for answer in once for p in answer["parameters"]], strict=True):
            p.copy_(q)
        x, _ = samples()
        assert torch.allclose(found[0], model(x[:BATCH]), atol=1e-6)
        assert torch.allclose(found[1], model(x[3:9]), atol=1e-6)


def test_evaluation_may_be_compressed() -> None:
    raw, coded = (
        run_ranks(evaluated, 2, {**FW3_BW6, "evaluation": evaluation})[1][0][0]
        for evaluation in ("raw", "maxabs(bits=4)")
    )
    assert not torch.equal(raw, coded)
    assert float((raw - coded).abs().max()) < 1.0


class Masked(nn.Module):
    """A block over sequences with a mask that travels with them; what lies behind a sample's length counts nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x * mask[..., None]
        return x + torch.tanh(self.linear(x)) + x.sum(1, keepdim=True) / mask.sum(1)[:, None, None], mask


def masked_loss(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    y, mask = out
    return (((y - target[:, : y.shape[1]]) * mask[..., None]) ** 2).sum() / mask.sum()


def of_lengths(rank: int, tell_lengths: bool, forward: str = "delta(maxabs(bits=3))") -> Any:
    """Batches padded to their longest sample, which differs; the same samples in every epoch, in other batches."""
    pipe = Pipe(
        rank, 2, kind=Masked, loss=masked_loss, forward=forward, backward="maxabs(bits=6)", max_length=LENGTH, chunks=2
    )
    x, y = samples()
    lengths = torch.tensor([2 + sample % (LENGTH - 1) for sample in range(SAMPLES)])
    losses = []
    for epoch in range(4):
        for ids in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(4):
            longest = int(lengths[ids].max())
            mask = (torch.arange(longest)[None] < lengths[ids][:, None]).float()
            more = {"length": longest, "lengths": lengths[ids] if tell_lengths else None}
            if pipe.first is not None:
                pipe.first.set_sample_ids(ids, **more)
            pipe.optimizer.zero_grad()
            found: list[Tensor] = []
            inputs = [x[ids, :longest], mask] if pipe.first else []
            target = y[ids, :longest] if pipe.last else None
            pipe.schedule.step(*inputs, target=target, losses=found, return_outputs=False)
            pipe.optimizer.step()
            losses += [float(loss.detach()) for loss in found]
    return pipe.digests(), losses, pipe.stages[0].stats.sent_bytes


def test_lengths_may_change_and_padding_need_not_be_sent() -> None:
    (mine, _, padded), (theirs, with_padding, _) = run_ranks(of_lengths, 2, False)
    check_sides([mine, theirs], [0])
    (mine, _, sent), (theirs, losses, _) = run_ranks(of_lengths, 2, True)
    check_sides([mine, theirs], [0])
    assert sent < 0.95 * padded
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
    assert sum(with_padding[-8:]) < 0.5 * sum(with_padding[:8])
    exact = run_ranks(of_lengths, 2, True, "raw")[1][1]
    assert exact == pytest.approx(run_ranks(of_lengths, 2, False, "raw")[1][1], rel=1e-5), "padding counts nowhere"


def test_a_fifth_of_the_gradients_in_8_bits() -> None:
    options = {"forward": "delta(maxabs(bits=2, rounding=nearest))", "backward": "topk(density=0.2) | maxabs(bits=8)"}
    answers = run_ranks(train, 2, 2, "gpipe", 6, options)
    check_sides([answer["digests"] for answer in answers], [0])
    losses = losses_of(answers)
    assert losses[-1] < 0.9 * losses[0]
    expected = CHUNKS * 64 + BATCH * thinwire.parse(options["backward"]).wire_bytes((LENGTH * WIDTH,))
    assert answers[1]["stats"][0].backward_sent_bytes == 6 * SAMPLES // BATCH * expected


def test_each_boundary_may_have_its_own_compressors() -> None:
    forward = ["delta(maxabs(bits=4))", "direct(maxabs(bits=8))", "delta(maxabs(bits=3))"]
    options = {"forward": forward, "backward": ["maxabs(bits=8)", "raw", "maxabs(bits=4)"]}
    answers = run_ranks(train, 4, 4, "gpipe", 3, options)
    check_sides([answer["digests"] for answer in answers], [0, 2])
    sent = [answer["stats"][0].backward_sent_bytes for answer in answers]
    assert 0 == sent[0] < sent[3] < sent[1] < sent[2]


def budgeted(rank: int, evict: str) -> Any:
    form_bytes = LENGTH * WIDTH * 4
    pipe = Pipe(rank, 2, **FW3_BW6, store=thinwire.store.Memory(budget_bytes=10 * form_bytes + 7, evict=evict))
    x, y = samples()
    losses = [loss for epoch in range(4) for loss in pipe.epoch(epoch, x, y)]
    (store,) = pipe.stages[0].stores.values()
    return pipe.digests(), losses, pipe.stages[0].stats, store.samples


@pytest.mark.parametrize("evict", ["newcomers", "oldest"])
def test_with_a_budget_both_sides_give_up_the_same(evict: str) -> None:
    (mine, _, stats, kept), (theirs, losses, other, also_kept) = run_ranks(budgeted, 2, evict)
    check_sides([mine, theirs], [0])
    assert kept == also_kept
    assert stats.kept_samples == other.kept_samples == 10
    assert stats.resets == other.resets == 0
    assert (stats.evicted > 0) == (evict == "oldest")
    assert stats.turned_away == (0 if evict == "oldest" else 4 * 6)
    assert stats.evicted == other.evicted
    assert losses[-1] < losses[0]


def replicated(rank: int) -> Any:
    """Two pipelines of two stages: PP × DP, activations and gradients compressed."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    replica, stage = rank % 2, rank // 2
    pipelines = [dist.new_group([r, r + 2]) for r in (0, 1)]
    data = [dist.new_group([2 * s, 2 * s + 1]) for s in (0, 1)]
    wires = []

    def wrap(module: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(module, process_group=data[stage])
        network = thinwire.Network(transport="group")
        wires.append(thinwire.compress(ddp, "minmax(bits=8)", min_numel=0, skip_if_slower=False, network=network))
        return ddp

    # DDP cannot form its buckets after a backward pass that only asks for shapes: they are told beforehand.
    shape = (SAMPLES // 2 // CHUNKS, LENGTH, WIDTH)
    known = {
        "input_args": torch.zeros(shape, requires_grad=stage > 0),
        "output_args": torch.zeros(shape, requires_grad=True),
    }
    pipe = Pipe(stage, 2, **FW3_BW6, group=pipelines[replica], wrap=wrap, arguments=known)
    x, y = samples()
    share = thinwire.data.Share(range(SAMPLES), replica, 2)
    losses = []
    for epoch in range(4):
        share.set_epoch(epoch)
        ids = torch.tensor(list(share))
        losses.append(pipe.step(x[ids], y[ids], ids))
    return pipe.digests(), losses, pipe.parameters(), wires[0].stats.payload_sent_bytes


def test_pipelines_and_data_parallelism_compress_side_by_side() -> None:
    answers = run_ranks(replicated, 4)
    for replica in (0, 1):
        check_sides([answers[replica][0], answers[replica + 2][0]], [0])
    for stage in (0, 1):
        one, other = answers[2 * stage], answers[2 * stage + 1]
        assert all(torch.equal(p, q) for p, q in zip(one[2], other[2], strict=True)), "replicas are identical"
        assert min(one[3], other[3]) > 0
    assert answers[2][1][-1] < answers[2][1][0]


def drawing(rank: int, ids: list[int] | None) -> list[list[Tensor]]:
    """What two replicas of a pipeline that start alike learn of the same samples, by rounding."""
    import torch.distributed as dist

    replica, stage = rank % 2, rank // 2
    x, y = samples()
    found = []
    for rounding in ("nearest", "stochastic"):
        pipelines = [dist.new_group([r, r + 2]) for r in (0, 1)]
        spec = f"maxabs(bits=4, rounding={rounding})"
        pipe = Pipe(stage, 2, forward=spec, backward=spec, group=pipelines[replica])
        pipe.step(x[:BATCH], y[:BATCH], ids)
        found.append(pipe.parameters())
    return found


@pytest.mark.parametrize("ids", [None, list(range(BATCH))])
def test_replicas_of_a_pipeline_round_apart(ids: list[int] | None) -> None:
    answers = run_ranks(drawing, 4, ids)
    for one, other in (answers[:2], answers[2:]):
        nearest, stochastic = (
            [torch.equal(p, q) for p, q in zip(*pair, strict=True)] for pair in zip(one, other, strict=True)
        )
        assert all(nearest)
        assert not any(stochastic)
    assert all(torch.equal(p, q) for p, q in zip(answers[0][1], run_ranks(drawing, 4, ids)[0][1], strict=True))


class TheirStage(TorchStage):
    """A framework's own."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return super().forward_one_chunk(*args, **kwargs)


def adopted(rank: int) -> Any:
    def compress(stage: TorchStage, **options: Any) -> Any:
        theirs = TheirStage(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group)
        compressed = thinwire.compress_stage(theirs, **options)
        assert isinstance(compressed, TheirStage)
        assert type(theirs) is TheirStage
        with pytest.raises(RuntimeError, match="compressed already"):
            thinwire.compress_stage(compressed, **options)
        return compressed

    pipe = Pipe(rank, 2, compress=compress, **FW3_BW6)
    x, y = samples()
    losses = [loss for epoch in range(2) for loss in pipe.epoch(epoch, x, y)]
    assert pipe.stages[0].seen == 4 * CHUNKS
    return pipe.digests(), losses


def test_subclasses_of_pytorchs_stage_keep_what_they_do_otherwise() -> None:
    (mine, _), (theirs, losses) = run_ranks(adopted, 2)
    check_sides([mine, theirs], [0])
    assert losses == losses_of(run_ranks(train, 2, 2, "gpipe", 2, FW3_BW6))


class Poison(Block):
    """Gives NaN for a sample whose input says so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.where(x > 100, float("nan"), 1.0)


def poisoned(rank: int) -> Any:
    pipe = Pipe(rank, 2, **FW3_BW6, kind=Poison)
    x, y = samples()
    pipe.epoch(0, x, y)
    weights = pipe.parameters()
    bad = x.clone()
    bad[5, 0, 0] = 1000.0
    losses = pipe.epoch(1, bad, y)
    with torch.no_grad():
        for p, q in zip([p for module in pipe.modules for p in module.parameters()], weights, strict=True):
            p.copy_(q)
    kept = pipe.stages[0].stats.kept_samples
    pipe.epoch(2, x, y)
    return losses, kept, pipe.stages[0].stats, pipe.digests()


def test_nan_arrives_and_is_not_kept() -> None:
    (_, kept, stats, mine), (losses, also_kept, other, theirs) = run_ranks(poisoned, 2)
    assert any(loss != loss for loss in losses)
    assert kept == also_kept < SAMPLES
    assert stats.nonfinite == other.nonfinite > 0
    assert stats.kept_samples == SAMPLES, "it is kept again once it is finite"
    check_sides([mine, theirs], [0])


def _by_compress(rank: int, num_ranks: int) -> str:
    stage = TorchStage(nn.Linear(4, 4), rank, num_ranks, torch.device("cpu"))
    with pytest.raises(TypeError) as error:
        thinwire.compress(stage, skip_if_slower=False)  # pyright: ignore[reportCallIssue, reportArgumentType]
    compressed = thinwire.compress(stage, forward="delta(maxabs(bits=3))", precision=8)
    assert compressed.submod is stage.submod
    assert compressed.stats.steps == 0
    return str(error.value)


def test_compress_takes_a_stage() -> None:
    for text in run_ranks(_by_compress, 2, 2):
        assert "skip_if_slower= is an argument of thinwire.compress_ddp() (DistributedDataParallel) and" in text


def _trains_the_stage_that_it_gave(rank: int, case: str) -> tuple[list[str], int]:
    """What is warned of in two steps and an evaluation, and the steps of the compressed stage that was kept."""
    kept: list[Any] = []

    def compress(stage: TorchStage) -> Any:
        kept.append(thinwire.compress_stage(stage, forward="maxabs(bits=4)"))
        if case == "thrown away":
            kept.clear()
            gc.collect()
        elif case == "compressed twice":
            kept[:] = [thinwire.compress_stage(stage, forward="maxabs(bits=8)")]
        return stage if case in ("thrown away", "plain", "evaluated") else kept[0]

    pipe = Pipe(rank, 2, compress=compress)
    x, y = samples()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if case != "evaluated":
            for _ in range(2):
                pipe.step(x[:BATCH], y[:BATCH], None)
        pipe.eval(x[:BATCH], y[:BATCH])
    return [str(warning.message) for warning in warned], sum(stage.stats.steps for stage in kept)


@pytest.mark.parametrize("case", ["thrown away", "plain", "evaluated", "compressed", "compressed twice"])
def test_training_the_plain_stage_in_place_of_the_compressed_one_is_warned_of(case: str) -> None:
    for rank, (warned, steps) in enumerate(run_ranks(_trains_the_stage_that_it_gave, 2, case)):
        assert steps == (2 if case.startswith("compressed") else 0)
        assert len(warned) == (case in ("thrown away", "plain"))
        for text in warned:
            assert text.startswith(f"stage {rank} trains without compression: ")
            assert "stage = thinwire.compress_stage(stage, ...)" in text
