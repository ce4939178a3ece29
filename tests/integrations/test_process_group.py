"""The process group of backend thinwire: what it compresses, what it passes on, and how it ends."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp, _functional_collectives as functional

import thinwire
from harness import run_ranks
from thinwire import DisagreementError, ProcessGroup, ProcessGroupOptions, TransportError, parse
from thinwire.collectives import Layer, Layout, part_layout, sent_bytes
from thinwire.collectives.shared_memory import unavailable
from thinwire.compressors import MinMax
from thinwire.integrations.group_options import GroupBuffer

NUMEL = 5000


def values(rank: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(7 + rank)).to(dtype)


def always(buffer: GroupBuffer) -> bool:
    return True


everything = partial(ProcessGroupOptions, where=always)
"""Options of a group that compresses all that it can."""


def group_of(options: ProcessGroupOptions | None = None) -> ProcessGroup:
    group = dist.new_group(backend="thinwire", pg_options=options or everything())
    assert isinstance(group, ProcessGroup)
    return group


def level(bits: int, inputs: list[torch.Tensor]) -> float:
    """The largest step of a quantiser of any of these, and of their sum."""
    return sum(float(x.float().max() - x.float().min()) for x in inputs) / (2**bits - 1)


def rounding(dtype: torch.dtype) -> float:
    return 0.0 if dtype == torch.float32 else 0.05


# --- reductions ------------------------------------------------------------------------------------------------------

OPERATIONS = {"sum": (ReduceOp.SUM, 1.0), "avg": (ReduceOp.AVG, None), "premul": (ReduceOp.PREMUL_SUM(0.25), 0.25)}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _reduces(rank: int) -> list[dict[str, torch.Tensor]]:
    group, found = group_of(), []
    for dtype in DTYPES:
        results = {}
        for name, (op, _) in OPERATIONS.items():
            x = values(rank, dtype=dtype)
            dist.all_reduce(x, op=op, group=group)
            results[name] = x
        found.append(results)
    assert (group.stats.compressed, group.stats.uniform, group.stats.passed) == (9, 9, 0)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_are_honoured_within_the_quantisers_error(num_ranks: int) -> None:
    for dtype, first, *others in zip(DTYPES, *run_ranks(_reduces, num_ranks), strict=True):
        inputs = [values(rank, dtype=dtype).float() for rank in range(num_ranks)]
        for name, (_, scale) in OPERATIONS.items():
            scale = 1.0 / num_ranks if scale is None else scale
            off = first[name].float() - scale * torch.stack(inputs).sum(0)
            # Each value is coded twice, and each time off by less than a level.
            assert 0 < float(off.abs().max()) < scale * 2.2 * level(4, inputs) + rounding(dtype)
            assert all(torch.equal(other[name].view(torch.uint8), first[name].view(torch.uint8)) for other in others)


def _exact(rank: int) -> list[str]:
    """Names of what differs between a thinwire group and gloo, in bits."""
    group, differ = group_of(), []
    cases: list[tuple[str, torch.Tensor, ReduceOp.RedOpType]] = []
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        cases.append((str(op), values(rank), op))
    for dtype in (torch.uint8, torch.int32, torch.int64):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            cases.append((f"{dtype} {op}", (values(rank).abs() * 10).to(dtype), op))
    cases.append(("bool", values(rank) > 0, ReduceOp.MAX))
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        cases.append((f"float64 {op}", values(rank, dtype=torch.float64), op))
        cases.append((f"small {op}", values(rank, 1023), op))
        cases.append((f"transposed {op}", values(rank).view(50, 100).t(), op))
        cases.append((f"none {op}", values(rank, 0), op))
    for name, x, op in cases:
        ours, gloos = x.clone(), x.clone()
        dist.all_reduce(ours, op=op, group=group)
        dist.all_reduce(gloos, op=op)
        if not torch.equal(ours, gloos):
            differ.append(name)
    sparse = torch.sparse_coo_tensor([[rank, 3000]], [1.0, 2.0], (NUMEL,))
    dist.all_reduce(sparse, group=group)
    if float(sparse.to_dense().sum()) != 6.0:
        differ.append("sparse")
    small = values(rank, 100)
    dist.all_reduce(small, op=ReduceOp.PREMUL_SUM(0.5), group=group)
    if not torch.allclose(small, 0.5 * (values(0, 100) + values(1, 100))):
        differ.append("small premul")
    with torch.inference_mode():
        inferred = values(rank)
        dist.all_reduce(inferred, group=group)
        gloos = values(rank)
        dist.all_reduce(gloos)
        if not torch.equal(inferred, gloos):
            differ.append("inference mode")
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(NUMEL, dtype=torch.int32), op=ReduceOp.AVG, group=group)
    assert group.stats.compressed == 0
    assert group.stats.payload_sent_bytes == 0
    assert group.stats.passed == len(cases) + 4
    return differ


def test_everything_else_is_bit_exact() -> None:
    assert run_ranks(_exact, 2) == [[], []]


def _several(rank: int) -> tuple[list[torch.Tensor], tuple[int, int]]:
    group = group_of()
    tensors = [values(rank), values(rank, 10), values(rank, 4096), values(rank, 3)]
    together = [x.clone() for x in tensors]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x, group=group)
    manager.wait()
    counted = group.stats.compressed, group.stats.passed
    work = group.allreduce_coalesced(together)
    assert work.get_future().wait() is not None
    assert work.is_completed()
    assert work.is_success()
    return tensors, counted


def test_several_tensors_in_one_call() -> None:
    results = run_ranks(_several, 2)
    for tensors, counted in results:
        assert counted == (2, 2)
        for got, first in zip(tensors, results[0][0], strict=True):
            exact = values(0, got.numel()) + values(1, got.numel())
            assert torch.equal(got, first)
            assert float((got - exact).norm()) < 0.25 * float(exact.norm())
            assert torch.equal(got, exact) == (got.numel() < 1024)


def _many_at_once(rank: int) -> list[torch.Tensor]:
    """More buffers of one size under way than there are sets of messages, and others between them, on two groups."""
    groups = [group_of(everything("minmax(bits=8)")), group_of(everything("minmax(bits=8)"))]
    tensors = [values(rank) * (i + 1) for i in range(7)] + [values(rank, 2048)]
    works = []
    for x in tensors:
        for group in groups:
            y = x.clone()
            works.append((y, dist.all_reduce(y, group=group, async_op=True)))
    for _, work in works:
        work.wait()
    return [y for y, _ in works]


def test_many_under_way_on_two_groups() -> None:
    results = run_ranks(_many_at_once, 3)
    for i, y in enumerate(results[0]):
        x = [values(rank, y.numel()) * (i // 2 + 1 if y.numel() == NUMEL else 1) for rank in range(3)]
        exact = x[0] + x[1] + x[2]
        assert float((y - exact).norm()) < 0.02 * float(exact.norm())
        assert all(torch.equal(other[i], y) for other in results)


def _sums_and_denominators(rank: int) -> dict[str, Any]:
    """What a group that is told nothing makes of tensors that are no gradients, and what it says."""
    group, differ = group_of(ProcessGroupOptions()), []
    size = dist.get_world_size()
    denominators = torch.exp(3 * values(rank) - 2)
    pair = torch.complex(values(rank), values(rank, NUMEL + 1)[1:])

    def gathered(x: torch.Tensor, to: Any) -> torch.Tensor:
        out = torch.empty(size * x.numel())
        dist.all_gather_single(out, x, group=to)
        return out

    def scattered(x: torch.Tensor, to: Any) -> torch.Tensor:
        out = torch.empty(x.numel() // size)
        dist.reduce_scatter_single(out, x, group=to)
        return out

    def reduced(x: torch.Tensor, to: Any, op: Any = ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(x, op, group=to)
        return x

    cases: dict[str, Any] = {
        "sum": lambda to: reduced(denominators.clone(), to),
        "sum of a matrix": lambda to: reduced(denominators.view(50, 100).clone(), to),
        "functional sum": lambda to: functional.wait_tensor(functional.all_reduce(denominators, "sum", to)),
        "gather": lambda to: gathered(denominators, to),
        "scatter": lambda to: scattered(denominators, to),
        "complex sum": lambda to: reduced(pair.clone(), to),
        "complex mean": lambda to: reduced(pair.clone(), to, ReduceOp.AVG),
        "functional complex mean": lambda to: functional.wait_tensor(functional.all_reduce(pair, "avg", to)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            differ += [name for name, run in cases.items() if not torch.equal(run(group), run(dist.group.WORLD))]
    said = [str(w.message) for w in caught if "register_model" in str(w.message)]
    compressed, unknown = group.stats.compressed, group.stats.unknown
    reduced(values(rank), group, ReduceOp.AVG)
    return {
        "differ": differ,
        "said": said,
        "compressed": compressed,
        "unknown": unknown,
        "then": group.stats.compressed,
    }


def test_only_what_is_known_to_be_gradients_or_weights_is_compressed_by_default() -> None:
    for found in run_ranks(_sums_and_denominators, 2):
        assert found["differ"] == []
        assert found["compressed"] == 0
        # Functional gathers and scatters, and complex numbers, are never compressed, whatever is known.
        assert found["unknown"] == 2 * 5
        assert found["then"] == 1
        assert [text.split("like it: ")[1].split(" of ")[0] for text in found["said"]] == [
            "all-reduce",
            "all-gather",
            "reduce-scatter",
        ]


def _chosen(rank: int) -> list[tuple[Any, ...]]:
    seen: list[GroupBuffer] = []

    def where(buffer: GroupBuffer) -> bool:
        seen.append(buffer)
        return buffer.numel > 2000

    group = group_of(ProcessGroupOptions(where=where))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for numel in (2000, 3000):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                dist.all_reduce(values(rank, numel), op, group=group)
    whole = torch.zeros(2, NUMEL)
    dist.all_gather_single(whole.view(-1), whole[rank], group=group)
    assert (group.stats.compressed, group.stats.unknown) == (3, 2)
    return [(b.kind, b.numel, b.op, b.in_place, b.registered, b.is_known) for b in seen]


def test_where_chooses_what_is_compressed() -> None:
    sums = [("all_reduce", n, op, False, False, op == "avg") for n in (2000, 3000) for op in ("sum", "avg")]
    assert run_ranks(_chosen, 2) == [[*sums, ("all_gather", NUMEL, None, True, False, True)]] * 2


# --- gathers and scatters --------------------------------------------------------------------------------------------


def _gathers(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group, size = group_of(), dist.get_world_size()
    single = torch.empty(size * NUMEL, dtype=dtype)
    dist.all_gather_single(single, values(rank, dtype=dtype), group=group)
    listed = [torch.empty(NUMEL, dtype=dtype) for _ in range(size)]
    dist.all_gather(listed, values(rank, dtype=dtype), group=group)
    # In place, as FSDP2 does it.
    aliased = torch.zeros(size, NUMEL, dtype=dtype)
    aliased[rank] = values(rank, dtype=dtype)
    dist.all_gather_single(aliased.view(-1), aliased[rank], group=group)
    assert group.stats.compressed == 3
    small = torch.empty(size * 3)
    dist.all_gather_single(small, values(rank, 3), group=group)
    assert torch.equal(small.view(-1, 3)[1], values(1, 3))
    assert group.stats.passed == 1
    return torch.stack([single.view(-1, NUMEL), aliased]), listed


def _scatters(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    group, size = group_of(), dist.get_world_size()
    x, found = values(rank, size * NUMEL, dtype), []
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.5)):
        out = torch.empty(NUMEL, dtype=dtype)
        dist.reduce_scatter_single(out, x, op=op, group=group)
        found.append(out)
    out = torch.empty(NUMEL, dtype=dtype)
    dist.reduce_scatter(out, list(x.chunk(size)), group=group)
    assert torch.equal(x, values(rank, size * NUMEL, dtype))
    assert group.stats.compressed == 4
    small = torch.empty(3)
    dist.reduce_scatter_single(small, torch.arange(3.0 * size), op=ReduceOp.PREMUL_SUM(2.0), group=group)
    assert torch.equal(small, 2.0 * size * torch.arange(3.0 * size).view(size, 3)[rank])
    largest = torch.empty(NUMEL, dtype=dtype)
    dist.reduce_scatter_single(largest, x, op=ReduceOp.MAX, group=group)
    want = torch.stack([values(r, size * NUMEL, dtype).view(size, -1)[rank] for r in range(size)]).amax(0)
    assert torch.equal(largest, want)
    return [*found, out]


def _halves(rank: int) -> list[tuple[Any, Any]]:
    return [(_gathers(rank, dtype), _scatters(rank, dtype)) for dtype in DTYPES[:2]]


def test_all_ranks_gather_the_same_bytes_and_reduce_scatter_codes_every_value_once() -> None:
    for dtype, *results in zip(DTYPES[:2], *run_ranks(_halves, 3), strict=True):
        inputs = [values(rank, 3 * NUMEL, dtype).float().view(3, -1) for rank in range(3)]
        first = results[0][0]
        for rank, ((stacked, listed), scattered) in enumerate(results):
            assert torch.equal(stacked, first[0])
            assert torch.equal(torch.stack(listed), torch.stack(first[1]))
            for source, part in ((r, part) for parts in (*stacked, listed) for r, part in enumerate(parts)):
                x = values(source, dtype=dtype).float()
                assert 0 < float((part.float() - x).abs().max()) < 1.05 * level(4, [x]) + rounding(dtype)
            for scale, out in zip((1.0, 1 / 3, 0.5, 1.0), scattered, strict=True):
                off = (out.float() - scale * sum(x[rank] for x in inputs)).abs()
                # The owner's own values are exact.
                others = [x[rank] for r, x in enumerate(inputs) if r != rank]
                assert 0 < float(off.max()) < scale * 1.05 * level(4, others) + rounding(dtype)


def _sent(rank: int) -> list[tuple[int, float]]:
    group, size, sent = group_of(), dist.get_world_size(), []
    for run in (
        lambda: dist.all_reduce(values(rank, 1 << 18), group=group),
        lambda: dist.all_gather_single(torch.empty(size << 18), values(rank, 1 << 18), group=group),
        lambda: dist.reduce_scatter_single(torch.empty(1 << 18), values(rank, size << 18), group=group),
    ):
        before = group.stats
        run()
        after = group.stats
        dense = after.dense_bytes - before.dense_bytes
        sent.append((after.payload_sent_bytes - before.payload_sent_bytes, dense))
    return sent


def test_bytes_sent_are_the_formula_and_several_times_fewer() -> None:
    layers = [Layer("", 0, (1 << 18,), MinMax())]
    whole = Layout.build([layers[0]._replace(name=f"all_reduce of {1 << 18}")], 3, torch.float32)
    parts = part_layout(layers, 3, torch.float32)
    for rank, found in enumerate(run_ranks(_sent, 3)):
        assert [sent for sent, _ in found] == [
            whole.sent_bytes(rank),
            sent_bytes(parts.reduction_traffic(up=False), rank),
            sent_bytes(parts.reduction_traffic(down=False), rank),
        ]
        assert all(7.0 < dense / sent < 7.2 for sent, dense in found)
        assert [dense for _, dense in found] == [4 * (4 << 18) // 3, 2 * (4 << 18), 2 * (4 << 18)]


def _draws(rank: int) -> list[torch.Tensor]:
    group, found = group_of(everything("minmax(bits=2)")), []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(100):
        x = values(rank, 2048)
        dist.all_reduce(x, group=group)
        found.append(x)
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (0, 1):
        other = group_of(everything("minmax(bits=2)", seed=seed))
        x = values(rank, 2048)
        dist.all_reduce(x, group=other)
        assert torch.equal(x, found[0]) == (seed == 0)
    return found


def test_draws_are_new_each_time_unbiased_and_leave_the_global_generator_alone() -> None:
    found = run_ranks(_draws, 2)[0]
    exact = values(0, 2048) + values(1, 2048)
    single = float((found[0] - exact).norm())
    assert float((torch.stack(found).mean(0) - exact).norm()) < 0.15 * single
    assert not torch.equal(found[0], found[1])


# --- everything else -------------------------------------------------------------------------------------------------


def _works_as_a_group(rank: int) -> None:
    group = group_of()
    x = values(rank, 4096)
    dist.broadcast(x, 0, group=group)
    assert torch.equal(x, values(0, 4096))
    dist.barrier(group=group)
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}]
    shared = [{"a": rank}]
    dist.broadcast_object_list(shared, 0, group=group)
    assert shared == [{"a": 0}]
    if rank == 0:
        dist.send(values(0, 4096), 1, group=group)
    else:
        dist.recv(x, 0, group=group)
        assert torch.equal(x, values(0, 4096))
    reduced = values(rank)
    dist.reduce(reduced, 0, group=group)
    assert rank or torch.equal(reduced, values(0) + values(1))
    swapped = torch.empty(2)
    dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0]) + 10 * rank, group=group)
    assert swapped.tolist() == [rank, 10 + rank]
    assert group.stats.compressed == 0
    exact = values(0) + values(1)
    mean = functional.wait_tensor(functional.all_reduce(values(rank), "avg", group))
    assert 0 < float((mean - exact / 2).norm()) < 0.1 * float(exact.norm())
    gathered = functional.wait_tensor(functional.all_gather_tensor(values(rank), 0, group))
    assert torch.equal(gathered, torch.cat([values(0), values(1)]))
    part = functional.wait_tensor(functional.reduce_scatter_tensor(values(rank), "sum", 0, group))
    assert torch.equal(part, exact.chunk(2)[rank])
    assert (dist.get_backend(group), dist.get_rank(group), dist.get_world_size(group)) == ("thinwire", rank, 2)
    with pytest.raises(NotImplementedError, match="new_group"):
        group.split_group([0, 1])
    leaf = values(rank).requires_grad_()
    dist.all_reduce(leaf, group=group)
    assert 0 < float((leaf.detach() - exact).norm()) < 0.25 * float(exact.norm())


def _lets_go_of_tensors(rank: int) -> list[str]:
    group = group_of()
    for turn in range(50):
        objects: list = [None, None]
        dist.all_gather_object(objects, turn, group=group)
        x = torch.full((64,), float(rank))
        dist.broadcast(x, 0, group=group)
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0]) + 10 * rank, group=group)
        dist.barrier(group=group)
        assert float(x.sum()) == 0.0
    # PyTorch calls those of its own that a subclass lacks with the interpreter in its hands.
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    names = re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text())
    assert "broadcast" in names
    return [name for name in names if name not in vars(group) and name not in vars(ProcessGroup)]


def _serves(rank: int) -> list[str]:
    _works_as_a_group(rank)
    return _lets_go_of_tensors(rank)


def test_it_works_as_any_process_group_and_nothing_waits_for_gloos_threads_with_the_interpreter_in_its_hands() -> None:
    """They wait for it, under the lock that a collective needs, where the last to let go of a tensor."""
    assert run_ranks(_serves, 2) == [[], []]


def _is_the_default_group(rank: int, backend: str, port: int) -> tuple[str, str, float]:
    dist.barrier()  # or the other rank may still be connecting to what is destroyed here
    dist.destroy_process_group()
    options = everything("minmax(bits=8)")
    timeout = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout, pg_options=options)
    x = values(rank)
    dist.all_reduce(x)
    assert isinstance(dist.group.WORLD, ProcessGroup)
    inherits = dist.new_group()
    assert isinstance(inherits, ProcessGroup)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for compress in (thinwire.compress, thinwire.compress_ddp):
        with pytest.raises(RuntimeError, match=r"call init_process_group\('gloo'\) for .*register_model\(model\)"):
            compress(model)
    exact = values(0) + values(1)
    dist.barrier()
    dist.destroy_process_group()
    return str(dist.is_initialized()), str(inherits.options.compressor), float((x - exact).norm() / exact.norm())


@pytest.mark.parametrize("backend", ["thinwire", "cpu:thinwire"])
def test_it_may_be_the_default_group(backend: str) -> None:
    # As torchrun has it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for initialized, compressor, error in run_ranks(_is_the_default_group, 2, backend, store.port):
        assert initialized == "False"
        assert compressor == "minmax(bits=8, bucket=128)"
        assert 0 < error < 0.02


def _alone(rank: int) -> None:
    group = group_of()
    x = values(rank)
    dist.all_reduce(x, op=ReduceOp.PREMUL_SUM(2.0), group=group)
    assert torch.equal(x, 2 * values(0))
    assert group.stats.compressed == 0


def test_a_world_of_one_sends_nothing() -> None:
    run_ranks(_alone, 1)


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_complete_themselves_and_the_backend_is_known() -> None:
    assert ProcessGroupOptions().compressor == ProcessGroupOptions().all_gather == MinMax(bits=4, bucket=128)
    assert ProcessGroupOptions().compressor == parse("minmax")
    assert str(ProcessGroupOptions("cast(bf16)").reduce_scatter) == "raw()"
    assert thinwire.ProcessGroup is ProcessGroup
    assert dist.is_backend_available("thinwire")


COMPRESSORS = [
    *("topk(density=0.5, feedback=False)", "fft(theta=0.5, feedback=False)", "cast(bf16)", "randk(density=0.5)"),
    *("qsgd(bits=8)", "natural", "raw", "threshold(lam=0.5, capacity=1.0, feedback=False)"),
]


def _other_compressors(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found = []
    for spec in COMPRESSORS:
        group = group_of(everything(spec))
        x, gathered, part = values(rank, 4096), torch.empty(8192), torch.empty(2048)
        dist.all_reduce(x, group=group)
        dist.all_gather_single(gathered, values(rank, 4096), group=group)
        dist.reduce_scatter_single(part, values(rank, 4096), group=group)
        found.append((x, gathered, part))
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="was destroyed"):
            group.allreduce([values(rank)])
    return found


def test_other_stateless_compressors() -> None:
    ours, theirs = run_ranks(_other_compressors, 2)
    exact = values(0, 4096) + values(1, 4096)
    for spec, (x, gathered, part), (same, as_well, _) in zip(COMPRESSORS, ours, theirs, strict=True):
        assert torch.equal(x, same), spec
        assert torch.equal(gathered, as_well), spec
        bound = 1.5 if spec.startswith("randk") else 0.6
        assert float((x - exact).norm()) < bound * float(exact.norm()), spec
        assert float((gathered - torch.cat([values(0, 4096), values(1, 4096)])).norm()) < 0.6 * 90.0, spec
        assert float((part - exact[:2048]).norm()) < 0.6 * float(exact.norm()), spec
        assert torch.equal(x, exact) == (spec == "raw")


WAYS: list[dict[str, str]] = [{"transport": "group"}, *([] if unavailable() else [{"transport": "shared"}])]
WAYS += [{"algorithm": name} for name in ("ring", "tree", "tree(root=1)", "allgather", "parameter_server(server=1)")]


def _ways(rank: int) -> list[torch.Tensor]:
    found = []
    for options in WAYS:
        group = group_of(everything("minmax(bits=8)", **options))
        x, gathered = values(rank), torch.empty(3 * NUMEL)
        dist.all_reduce(x, group=group)
        dist.all_gather_single(gathered, values(rank), group=group)
        if "transport" in options:
            shared = group.stats.payload_sent_bytes if options["transport"] == "shared" else 0
            assert group.stats.payload_shared_bytes == shared
        found.append(torch.cat([x, gathered]))
    return found


def test_over_each_transport_and_algorithm_all_ranks_have_the_same_bytes() -> None:
    exact = torch.cat([sum(values(rank) for rank in range(3)), *(values(rank) for rank in range(3))])
    results = run_ranks(_ways, 3)
    for of_ranks in zip(*results, strict=True):
        assert all(torch.equal(x, of_ranks[0]) for x in of_ranks)
        assert 0 < float((of_ranks[0] - exact).norm()) < 0.03 * float(exact.norm())
    assert all(torch.equal(found, results[0][0]) for found in results[0][: len(WAYS) - 5])


def _disagree(rank: int) -> None:
    with pytest.raises(DisagreementError, match=r"compressor: minmax\(bits=4"):
        group_of(everything(f"minmax(bits={4 + rank})"))
    with pytest.raises(TypeError, match="ProcessGroupOptions"):
        dist.new_group(backend="thinwire", pg_options={"bits": 4})
    group = group_of()
    with pytest.raises(DisagreementError, match="all_reduce of 5000 elements"):
        dist.all_reduce(values(rank, NUMEL + rank), group=group)
    x = values(rank)
    dist.all_reduce(x, group=group)
    with pytest.raises(DisagreementError, match="layer x"):
        group.register_layout([("x", (4 + rank, 4))])


def test_ranks_that_differ_are_reported() -> None:
    run_ranks(_disagree, 2)


# --- ends ------------------------------------------------------------------------------------------------------------


def _dies(rank: int) -> str:
    # Groups of a part of the world: a dead rank has its number in the default group.
    groups = [dist.new_group(ranks, backend="thinwire", pg_options=everything()) for ranks in ([0, 2], [1])]
    dist.barrier()
    if rank == 1:
        return ""
    x = values(rank)
    dist.all_reduce(x, group=groups[0])
    if rank == 2:
        os._exit(1)
    works = [dist.all_reduce(values(rank), group=groups[0], async_op=True) for _ in range(3)]
    texts = []
    for work in works:
        with pytest.raises(TransportError) as error:
            work.wait()
        assert (error.value.rank, error.value.host) == (2, socket.gethostname())
        assert error.value.reason == "its process has ended"
        texts.append(str(error.value))
        assert not work.is_success()
    assert "the link broke earlier" in texts[-1]
    return texts[0]


def test_a_dead_rank_is_an_error_for_the_others() -> None:
    text, _, none = run_ranks(_dies, 3, may_die=True)
    assert none is None
    assert "restart from the last checkpoint" in text.lower()


def _comes_late(rank: int) -> int | None:
    if rank == 1:
        time.sleep(1.5)
        return None
    with pytest.raises(TransportError, match="rank 1 did not come") as error:
        dist.new_group(backend="thinwire", timeout=timedelta(seconds=0.5))
    return error.value.rank


def test_a_rank_that_makes_no_group_is_named() -> None:
    assert run_ranks(_comes_late, 2)[0] == 1


def _is_silent(rank: int) -> None:
    group = dist.new_group(backend="thinwire", timeout=timedelta(seconds=2), pg_options=everything())
    x = values(rank)
    dist.all_reduce(x, group=group)
    if rank == 0:
        with pytest.raises(TransportError, match="timeout is 2 s") as error:
            dist.all_reduce(x, group=group)
        assert error.value.rank == 1
        assert "has begun" in str(error.value.reason)
    dist.barrier()


def test_a_silent_rank_is_an_error_within_the_timeout() -> None:
    run_ranks(_is_silent, 2, timeout_s=60.0)


_SCRIPT = """
import sys, torch, torch.distributed as dist, thinwire
dist.init_process_group("cpu:thinwire", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
x = torch.ones(4096)
dist.all_reduce(x)
assert torch.equal(x, torch.full((4096,), 2.0))
dist.barrier()
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
print("end", flush=True)
"""


def test_a_process_ends_whether_it_destroys_its_group_or_leaves_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], stdout=subprocess.PIPE, text=True)
        for rank, how in enumerate(("destroy", "leave"))
    ]
    try:
        for process in ranks:
            out, _ = process.communicate(timeout=90)
            assert out == "end\n"
            assert process.returncode == 0
    finally:
        for process in ranks:
            process.kill()
