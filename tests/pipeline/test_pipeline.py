"""Compressed pipelines under PyTorch's schedules: what both sides keep, what training and evaluation see."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks, run_ranks
from pipelines import (
    BATCH,
    CHUNKS,
    LENGTH,
    MULTI,
    SAMPLES,
    SINGLE,
    WIDTH,
    Block,
    Pipe,
    check_sides,
    needs_pipelines,
    samples,
)
from ranks import alike, of_ranks

pytestmark = needs_pipelines

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}
RAW: dict[str, Any] = {"forward": "raw", "backward": "raw"}
NUMEL, STEPS = LENGTH * WIDTH, SAMPLES // BATCH
"""Elements of a sample's activation, and steps of an epoch."""


def trained(rank: int, epochs: int = 3, name: str = "gpipe", **options: Any) -> tuple[Pipe, list[float]]:
    """This rank's part of a pipeline after some epochs, in a group of its own, whose steps begin at 0; all losses."""
    pipe = Pipe(rank, dist.get_world_size(), name, group=dist.new_group(), **options)
    losses = [loss for epoch in range(epochs) for loss in pipe.epoch(epoch, *samples())]
    return pipe, next(of for of in of_ranks(losses) if of)


def by_epoch(pipe: Pipe, epochs: int, direction: str) -> list[int]:
    """Bytes that this rank's first stage sends in each epoch."""
    sent = [0]
    for epoch in range(epochs):
        pipe.epoch(epoch, *samples())
        sent.append(getattr(pipe.stages[0].stats, f"{direction}sent_bytes"))
    return [late - early for early, late in itertools.pairwise(sent)]


@on_ranks(2)
def test_both_sides_keep_the_same_under_every_schedule(rank: int) -> None:
    found = {}
    for name in (*SINGLE, *MULTI):
        pipe, losses = trained(rank, name=name, **FW3_BW6)
        check_sides(of_ranks(pipe.digests()), {"zbv": [0, 2]}.get(name, [0] if name in SINGLE else [0, 1, 2]))
        for stats in (stage.stats for stage in pipe.stages):
            assert (stats.steps, stats.evaluations) == (3 * STEPS, 0)
            assert not any((stats.resets, stats.corrupt, stats.nonfinite, stats.evicted))
        assert len(losses) == 3 * STEPS
        assert losses[-1] < losses[0]
        found[name] = losses, pipe.digests()
    assert found["gpipe"] == found["1f1b"]


FROZEN = {
    "gpipe": [set(), {0}, {1}, {2}, {0, 1}],
    "1f1b": [{0, 1}],
    "interleaved": [{0, 1, 2}],
    "zero bubble": [{0}],
    "zbv": [set()],
}
"""By schedule, stages that do not train."""


def frozen(rank: int, name: str) -> None:
    x, y = samples()
    for stages in FROZEN[name]:
        found, sent = {}, {}
        for forward in (None, "raw", "maxabs(bits=8)", "delta(maxabs(bits=4))"):
            compressors = {"forward": forward, "backward": "raw" if forward == "raw" else "maxabs(bits=8)"}
            how = compressors if forward else {"compress": lambda stage: stage}
            pipe = Pipe(rank, dist.get_world_size(), name, **how)
            for index, module in zip(pipe.indices, pipe.modules, strict=True):
                module.requires_grad_(index not in stages)
            losses = [pipe.step(x[:BATCH], y[:BATCH], range(BATCH) if forward else None) for _ in range(3)]
            assert losses[0] is None or losses[-1] < losses[0]
            found[forward] = losses, pipe.parameters()
            sent = {stage.stage_index: stage.stats.backward_sent_bytes for stage in pipe.stages if forward}
        assert found["raw"][0] == found[None][0]
        assert alike(found["raw"][1], found[None][1])
        # Gradients go back to the first stage that trains, and no further.
        sent = {index: sent_bytes for of in of_ranks(sent) for index, sent_bytes in of.items()}
        first = min(set(sent) - stages)
        assert name == "zbv" or [i for i in sent if sent[i]] == [i for i in sent if i > first]


@pytest.mark.parametrize("name", FROZEN)
def test_raw_and_frozen_stages_train_as_pytorchs_do(name: str) -> None:
    run_ranks(frozen, 3 if name in SINGLE else 2, name, group_timeout_s=8)


@on_ranks(2)
def test_changes_train_where_activations_of_the_same_bits_do_not(rank: int) -> None:
    raw, delta, direct = (
        sum(trained(rank, 25, "interleaved", forward=forward, backward="maxabs(bits=6)", lr=1.0)[1][-4:])
        for forward in ("raw", "delta(maxabs(bits=3))", "direct(maxabs(bits=3))")
    )
    assert delta < 1.1 * raw
    assert direct > 1.8 * raw


@on_ranks(2)
def test_statistics_show_changes_shrink_and_bytes_add_up(rank: int) -> None:
    earlier, later = of_ranks(trained(rank, 8, **FW3_BW6, lr=0.05)[0].stages[0].stats)
    steps = 8 * STEPS
    assert [epoch.samples for epoch in earlier.epochs] == [SAMPLES] * 8
    assert earlier.epochs[0].delta == 0
    assert all(0.1 < epoch.activation < 10 for epoch in earlier.epochs)
    deltas = [epoch.delta for epoch in earlier.epochs[1:]]
    assert deltas[-1] < deltas[0] < 0.3 * earlier.epochs[1].activation
    assert later.epochs == []
    forward, backward = (thinwire.parse(f"maxabs(bits={bits})").wire_bytes((NUMEL,)) for bits in (3, 6))
    per_step = CHUNKS * 64 + BATCH * forward
    assert earlier.forward_sent_bytes == 2 * (CHUNKS * 64 + BATCH * 4 * NUMEL) + (steps - 2) * per_step
    assert later.backward_sent_bytes == steps * (CHUNKS * 64 + BATCH * backward)
    assert earlier.received_bytes == later.backward_sent_bytes
    assert later.received_bytes == earlier.forward_sent_bytes
    assert earlier.dense_bytes == later.dense_bytes == steps * BATCH * NUMEL * 4
    assert earlier.kept_samples == later.kept_samples == SAMPLES
    assert earlier.store_bytes == SAMPLES * NUMEL * 4
    assert earlier.saved_bytes == earlier.dense_bytes - earlier.sent_bytes
    assert str(earlier).startswith("16 steps, ")
    assert earlier.to_dict()["ratio"] == earlier.ratio > 1
    assert min(earlier.encode_s, earlier.decode_s, earlier.store_s, earlier.agree_s, later.decode_s) > 0


@on_ranks(2)
def test_changes_that_stay_large_are_said_once(rank: int) -> None:
    for dropout, warmup in ((0.0, 0), (0.2, 0), (0.2, 3)):
        options = {"warmup_epochs": warmup, "wrap": lambda m, p=dropout: nn.Sequential(m, nn.Dropout(p)), "lr": 0.05}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe, _ = trained(rank, 6, **FW3_BW6, **options)
        texts = [str(w.message) for w in caught if "between two visits" in str(w.message)]
        assert len(texts) == (dropout > 0 and rank == 0)
        assert all("boundary 0" in text and "p=0" in text for text in texts)
        if rank == 0:
            shares = [epoch.share for epoch in pipe.stages[0].stats.epochs]
            assert shares[: max(warmup, 1)] == [0] * max(warmup, 1)
            assert not dropout or shares[-1] > 0.3


@on_ranks(2)
def test_a_warm_up_is_uncompressed_both_ways(rank: int) -> None:
    headers, raw = 2 * CHUNKS * 64, SAMPLES * NUMEL * 4
    for warmup in (0, 1, 2):
        pipe = Pipe(rank, 2, **FW3_BW6, warmup_epochs=warmup, precision=8)
        forward, backward = of_ranks(by_epoch(pipe, 4, ""))
        check_sides(of_ranks(pipe.digests()), [0])
        # A first visit is whole in any case, in however few bits it is kept.
        assert [sent == headers + raw for sent in forward] == [epoch < max(warmup, 1) for epoch in range(4)]
        assert [sent == headers + raw for sent in backward] == [epoch < warmup for epoch in range(4)]
        assert forward[max(warmup, 1) :] == [forward[-1]] * (4 - max(warmup, 1))
        assert forward[-1] < 0.4 * (headers + raw)
    # Samples without room are not warmed up for ever.
    room = thinwire.store.Memory(budget_bytes=4 * NUMEL * 4)
    backward = of_ranks(by_epoch(Pipe(rank, 2, **FW3_BW6, warmup_epochs=1, store=room), 3, "backward_"))[1]
    coded = thinwire.parse("maxabs(bits=6)").payload_bytes(NUMEL, torch.float32)
    assert backward == [headers + 4 * (NUMEL * 4) + 12 * coded, *[headers + 16 * coded] * 2]


@on_ranks(2)
def test_half_precision_and_a_smaller_last_batch(rank: int) -> None:
    """16 samples in batches of 13: the last has 3, in 3 micro-batches."""
    x, y = samples()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pipe = Pipe(rank, 2, **FW3_BW6, chunks=3, precision=16, wrap=lambda module, dtype=dtype: module.to(dtype))
        losses = [loss for epoch in range(3) for loss in pipe.epoch(epoch, x.to(dtype), y.to(dtype), batch=13)]
        check_sides(of_ranks(pipe.digests()), [0])
        assert not losses or losses[-1] < losses[1]
        assert pipe.stages[0].stats.dense_bytes == 3 * SAMPLES * NUMEL * dtype.itemsize


@on_ranks(2)
def test_evaluation_leaves_messages_alone_sees_the_model_itself_and_may_be_compressed(rank: int) -> None:
    x, y = samples()
    pipe, _ = trained(rank, 1, **FW3_BW6)
    kept, weights = pipe.digests(), [p for of in of_ranks(pipe.parameters()) for p in of]
    found = [pipe.eval(x[:BATCH], y[:BATCH]), pipe.eval(x[3:9], y[3:9], ids=range(3, 9))]
    assert pipe.digests() == kept
    pipe.epoch(1, x, y)
    stats = pipe.stages[0].stats
    assert (stats.steps, stats.evaluations) == (2 * STEPS, 2)
    without, _ = trained(rank, 2, **FW3_BW6)
    assert pipe.digests() == without.digests()
    assert alike(pipe.parameters(), without.parameters())
    coded = trained(rank, 1, **FW3_BW6, evaluation="maxabs(bits=4)")[0].eval(x[:BATCH], y[:BATCH])
    if rank == 0:
        return
    assert found[0] is not None
    assert found[1] is not None
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for p, q in zip(model.parameters(), weights, strict=True):
            p.copy_(q)
        assert torch.allclose(found[0], model(x[:BATCH]), atol=1e-6)
        assert torch.allclose(found[1], model(x[3:9]), atol=1e-6)
    assert 0 < float((found[0] - coded).abs().max()) < 1.0


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


def of_lengths(rank: int, tell_lengths: bool, forward: str = "delta(maxabs(bits=3))") -> tuple[list[float], int]:
    """Losses and bytes of batches padded to their longest sample; the same samples in every epoch, in other batches."""
    kind = {"kind": Masked, "loss": masked_loss, "max_length": LENGTH, "chunks": 2, "group": dist.new_group()}
    pipe = Pipe(rank, 2, forward=forward, backward="maxabs(bits=6)", **kind)
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
    check_sides(of_ranks(pipe.digests()), [0] if "delta" in forward else [])
    return next(of for of in of_ranks(losses) if of), pipe.stages[0].stats.sent_bytes


@on_ranks(2)
def test_lengths_may_change_and_padding_need_not_be_sent(rank: int) -> None:
    with_padding, padded = of_lengths(rank, False)
    without, sent = of_lengths(rank, True)
    assert sent < 0.95 * padded or rank == 1
    for losses in (with_padding, without):
        assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
    exact, also_exact = (of_lengths(rank, tell, "raw")[0] for tell in (True, False))
    assert exact == pytest.approx(also_exact, rel=1e-5), "padding counts nowhere"


@on_ranks(4)
def test_each_boundary_may_have_its_own_compressors(rank: int) -> None:
    forward = ["delta(maxabs(bits=4))", "direct(maxabs(bits=8))", "delta(maxabs(bits=3))"]
    backward = ["topk(density=0.2) | maxabs(bits=8)", "raw", "maxabs(bits=4)"]
    pipe, losses = trained(rank, forward=forward, backward=backward)
    check_sides(of_ranks(pipe.digests()), [0, 2])
    assert losses[-1] < losses[0]
    coded = [CHUNKS * 64 + BATCH * thinwire.parse(spec).wire_bytes((NUMEL,)) for spec in backward]
    assert pipe.stages[0].stats.backward_sent_bytes == 3 * STEPS * [0, *coded][rank]


@on_ranks(4)
def test_pipelines_and_data_parallelism_compress_side_by_side(rank: int) -> None:
    """Two pipelines of two stages: PP × DP, activations and gradients compressed."""
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
    digests = of_ranks(pipe.digests())
    check_sides([digests[replica], digests[replica + 2]], [0])
    assert alike(of_ranks(pipe.parameters())[rank ^ 1], pipe.parameters()), "replicas are identical"
    assert wires[0].stats.payload_sent_bytes > 0
    assert stage == 0 or losses[-1] < losses[0]


@on_ranks(4)
def test_replicas_of_a_pipeline_round_apart(rank: int) -> None:
    """Two replicas of a pipeline that start alike learn alike of the same samples, but for how they round."""
    replica, stage = rank % 2, rank // 2
    x, y = samples()

    def learned(rounding: str, ids: Any) -> list[Tensor]:
        pipelines = [dist.new_group([r, r + 2]) for r in (0, 1)]
        spec = f"maxabs(bits=4, rounding={rounding})"
        pipe = Pipe(stage, 2, forward=spec, backward=spec, group=pipelines[replica])
        pipe.step(x[:BATCH], y[:BATCH], ids)
        return pipe.parameters()

    for ids in (None, range(BATCH)):
        mine = learned("nearest", ids)
        assert alike(of_ranks(mine)[rank ^ 1], mine)
        mine = learned("stochastic", ids)
        assert not any(torch.equal(p, q) for p, q in zip(of_ranks(mine)[rank ^ 1], mine, strict=True))
        assert alike(learned("stochastic", ids), mine)


class TheirStage(TorchStage):
    """A framework's own."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return super().forward_one_chunk(*args, **kwargs)


@on_ranks(2)
def test_subclasses_of_pytorchs_stage_keep_what_they_do_otherwise(rank: int) -> None:
    def compress(stage: TorchStage, **options: Any) -> Any:
        theirs = TheirStage(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group)
        compressed = thinwire.compress_stage(theirs, **options)
        assert isinstance(compressed, TheirStage)
        assert type(theirs) is TheirStage
        with pytest.raises(RuntimeError, match="compressed already"):
            thinwire.compress_stage(compressed, **options)
        for name in ("run", "options", "totals", "stats", "close"):
            setattr(theirs, name, None)
            with pytest.raises(TypeError, match=f"TheirStage has {name}, which a compressed stage has for itself"):
                thinwire.compress_stage(theirs, **options)
            delattr(theirs, name)
        return compressed

    pipe, losses = trained(rank, 2, compress=compress, **FW3_BW6)
    assert pipe.stages[0].seen == 2 * STEPS * CHUNKS
    plain, expected = trained(rank, 2, **FW3_BW6)
    assert losses == expected
    assert pipe.digests() == plain.digests()


@on_ranks(2)
def test_nan_arrives_and_is_not_kept(rank: int) -> None:
    x, y = samples()
    pipe, _ = trained(rank, 1, **FW3_BW6)
    weights = pipe.parameters()
    bad = x.clone()
    bad[5, 0, 0] = torch.nan
    losses = pipe.epoch(1, bad, y)
    assert not losses or any(loss != loss for loss in losses)
    with torch.no_grad():
        for p, q in zip([p for module in pipe.modules for p in module.parameters()], weights, strict=True):
            p.copy_(q)
    one, other = of_ranks((pipe.stages[0].stats.kept_samples, pipe.stages[0].stats.nonfinite))
    assert one == other
    assert one[0] < SAMPLES
    assert one[1] > 0
    pipe.epoch(2, x, y)
    assert pipe.stages[0].stats.kept_samples == SAMPLES, "it is kept again once it is finite"
    check_sides(of_ranks(pipe.digests()), [0])


@on_ranks(2)
def test_training_the_plain_stage_in_place_of_the_compressed_one_is_warned_of(rank: int) -> None:
    x, y = samples()
    for case in ("thrown away", "plain", "evaluated", "compressed", "compressed twice"):
        kept: list[Any] = []

        def compress(stage: TorchStage, case: str = case, kept: list[Any] = kept) -> Any:
            kept.append(thinwire.compress_stage(stage, forward="maxabs(bits=4)"))
            if case == "thrown away":
                kept.clear()
                gc.collect()
            elif case == "compressed twice":
                kept[:] = [thinwire.compress_stage(stage, forward="maxabs(bits=8)")]
            return stage if case in ("thrown away", "plain", "evaluated") else kept[0]

        pipe = Pipe(rank, 2, compress=compress)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if case != "evaluated":
                for _ in range(2):
                    pipe.step(x[:BATCH], y[:BATCH], None)
            pipe.eval(x[:BATCH], y[:BATCH])
        assert sum(stage.stats.steps for stage in kept) == (2 if case.startswith("compressed") else 0)
        texts = [str(warning.message) for warning in warned]
        assert len(texts) == (case in ("thrown away", "plain")), texts
        for text in texts:
            assert text.startswith(f"stage {rank} trains without compression: ")
            assert "stage = thinwire.compress_stage(stage, ...)" in text
