"""The process group of backend thinwire: what it compresses, what it passes on, and how it ends."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp, _functional_collectives as functional, _make_nccl_premul_sum as premul_sum

import thinwire
from harness import on_ranks, run_ranks
from ranks import assert_alike
from thinwire import DisagreementError, ProcessGroup, ProcessGroupOptions, TransportError
from thinwire.collectives import Layer, Layout, part_layout, sent_bytes
from thinwire.collectives.shared_memory import unavailable
from thinwire.compat import all_gather_single, reduce_scatter_single
from thinwire.compressors import MinMax
from thinwire.integrations import process_group
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
    """The largest step of a quantizer of any of these, and of their sum."""
    return sum(float(x.float().max() - x.float().min()) for x in inputs) / (2**bits - 1)


def assert_near(x: torch.Tensor, exact: torch.Tensor, share: float) -> None:
    assert 0 < float((x.detach() - exact).norm()) < share * float(exact.norm())


OPERATIONS = ((ReduceOp.SUM, 1.0), (ReduceOp.AVG, None), (premul_sum(0.25), 0.25))


DTYPES = {torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.05}
"""And how far each rounds."""


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_sums_are_honored_within_the_quantizers_error(rank: int, size: int) -> None:
    group = group_of()
    for dtype, rounding in DTYPES.items():
        inputs = [values(each, dtype=dtype).float() for each in range(size)]
        for op, scale in OPERATIONS:
            x = values(rank, dtype=dtype)
            dist.all_reduce(x, op=op, group=group)
            scale = 1.0 / size if scale is None else scale
            # Each value is coded twice, and each time off by less than a level.
            off = float((x.float() - scale * torch.stack(inputs).sum(0)).abs().max())
            assert 0 < off < scale * 2.2 * level(4, inputs) + rounding
            assert_alike(x)
    assert (group.stats.compressed, group.stats.uniform, group.stats.passed) == (9, 9, 0)


@on_ranks(2)
def test_everything_else_is_bit_exact(rank: int) -> None:
    group = group_of()
    cases = [(values(rank), op) for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)]
    for dtype in (torch.uint8, torch.int64):
        x = (values(rank).abs() * 10).to(dtype)
        cases += [(x, op) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)]
    cases.append((values(rank) > 0, ReduceOp.MAX))
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        transposed = values(rank).view(50, 100).t()
        exact = values(rank, dtype=torch.float64), values(rank, 1023), transposed, values(rank, 0)
        cases += [(x, op) for x in exact]
    for x, op in cases:
        ours, gloos = x.clone(), x.clone()
        dist.all_reduce(ours, op=op, group=group)
        dist.all_reduce(gloos, op=op)
        assert torch.equal(ours, gloos), (x.dtype, x.shape, op)
    sparse = torch.sparse_coo_tensor([[rank, 3000]], [1.0, 2.0], (NUMEL,))
    dist.all_reduce(sparse, group=group)
    assert float(sparse.to_dense().sum()) == 6.0
    small = values(rank, 100)
    dist.all_reduce(small, op=premul_sum(0.5), group=group)
    torch.testing.assert_close(small, 0.5 * (values(0, 100) + values(1, 100)))
    with torch.inference_mode():
        inferred, gloos = values(rank), values(rank)
        dist.all_reduce(inferred, group=group)
        dist.all_reduce(gloos)
        assert torch.equal(inferred, gloos)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(NUMEL, dtype=torch.int32), op=ReduceOp.AVG, group=group)
    assert (group.stats.compressed, group.stats.payload_sent_bytes, group.stats.passed) == (0, 0, len(cases) + 4)


@on_ranks(3)
def test_several_tensors_in_one_call_and_many_under_way_on_two_groups(rank: int) -> None:
    """Several tensors in one call; then more buffers of one size under way than there are sets of messages, and others
    between them, on two groups."""
    group, counts = group_of(), (5000, 10, 4096, 3)
    tensors = [values(rank, numel) for numel in counts]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x, group=group)
    manager.wait()
    assert (group.stats.compressed, group.stats.passed) == (2, 2)
    together = [values(rank, numel) for numel in counts]
    work = group.allreduce_coalesced(together)
    assert work.get_future().wait() is not None
    assert work.is_completed()
    assert work.is_success()
    for x in (*tensors, *together):
        exact = sum(values(each, x.numel()) for each in range(3))
        assert float((x - exact).norm()) < 0.25 * float(exact.norm())
        assert torch.allclose(x, exact) == (x.numel() < 1024)

    groups, works = [group_of(everything("minmax(bits=8)")) for _ in range(2)], []
    for factor, numel in [*((i + 1, NUMEL) for i in range(7)), (1, 2048)]:
        for group in groups:
            y = values(rank, numel) * factor
            works.append((y, factor, dist.all_reduce(y, group=group, async_op=True)))
    for y, factor, work in works:
        work.wait()
        assert_near(y, sum(values(each, y.numel()) * factor for each in range(3)), 0.02)
    assert_alike(*tensors, *(y for y, *_ in works))


@on_ranks(2)
def test_only_what_is_known_to_be_gradients_or_weights_is_compressed_by_default(rank: int) -> None:
    """Of tensors that are no gradients, in a group that is told nothing."""
    group, size = group_of(ProcessGroupOptions()), dist.get_world_size()
    denominators = torch.exp(3 * values(rank) - 2)
    pair = torch.complex(values(rank), values(rank, NUMEL + 1)[1:])

    def gathered(to: Any) -> torch.Tensor:
        out = torch.empty(size * NUMEL)
        all_gather_single(out, denominators, group=to)
        return out

    def scattered(to: Any) -> torch.Tensor:
        out = torch.empty(NUMEL // size)
        reduce_scatter_single(out, denominators, to, ReduceOp.SUM)
        return out

    def reduced(x: torch.Tensor, to: Any, op: Any = ReduceOp.SUM) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, op, group=to)
        return x

    # Functional gathers and scatters, and complex numbers, are never compressed, whatever is known.
    cases: list[Any] = [
        partial(reduced, denominators),
        partial(reduced, denominators.view(50, 100)),
        lambda to: functional.wait_tensor(functional.all_reduce(denominators, "sum", to)),
        gathered,
        scattered,
        partial(reduced, pair),
        partial(reduced, pair, op=ReduceOp.AVG),
        lambda to: functional.wait_tensor(functional.all_reduce(pair, "avg", to)),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for run in cases:
                assert torch.equal(run(group), run(dist.group.WORLD)), run
    said = [str(w.message).split("like it: ")[1] for w in caught if "register_model" in str(w.message)]
    assert [text.split(" of ")[0] for text in said] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert (group.stats.compressed, group.stats.unknown) == (0, 2 * 5)
    reduced(values(rank), group, ReduceOp.AVG)
    assert group.stats.compressed == 1


@on_ranks(2)
def test_where_chooses_what_is_compressed(rank: int) -> None:
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
    all_gather_single(whole.view(-1), whole[rank], group=group)
    assert (group.stats.compressed, group.stats.unknown) == (3, 2)
    sums = [("all_reduce", n, op, False, False, op == "avg") for n in (2000, 3000) for op in ("sum", "avg")]
    found = [(b.kind, b.numel, b.op, b.in_place, b.registered, b.is_known) for b in seen]
    assert found == [*sums, ("all_gather", NUMEL, None, True, False, True)]


def _gathers(rank: int, dtype: torch.dtype) -> None:
    group, size = group_of(), dist.get_world_size()
    single = torch.empty(size * NUMEL, dtype=dtype)
    all_gather_single(single, values(rank, dtype=dtype), group=group)
    listed = [torch.empty(NUMEL, dtype=dtype) for _ in range(size)]
    dist.all_gather(listed, values(rank, dtype=dtype), group=group)
    # In place, as FSDP2 does it.
    aliased = torch.zeros(size, NUMEL, dtype=dtype)
    aliased[rank] = values(rank, dtype=dtype)
    all_gather_single(aliased.view(-1), aliased[rank], group=group)
    assert group.stats.compressed == 3
    small = torch.empty(size * 3)
    all_gather_single(small, values(rank, 3), group=group)
    assert torch.equal(small.view(-1, 3)[1], values(1, 3))
    assert group.stats.passed == 1
    assert_alike(single, aliased, listed)
    for source in range(size):
        x = values(source, dtype=dtype).float()
        for part in (single.view(-1, NUMEL)[source], aliased[source], listed[source]):
            assert 0 < float((part.float() - x).abs().max()) < 1.05 * level(4, [x]) + DTYPES[dtype]


def _scatters(rank: int, dtype: torch.dtype) -> None:
    group, size = group_of(), dist.get_world_size()
    x, found = values(rank, size * NUMEL, dtype), []
    for op in (ReduceOp.SUM, ReduceOp.AVG, premul_sum(0.5)):
        out = torch.empty(NUMEL, dtype=dtype)
        reduce_scatter_single(out, x, op=op, group=group)
        found.append(out)
    out = torch.empty(NUMEL, dtype=dtype)
    dist.reduce_scatter(out, list(x.chunk(size)), group=group)
    assert torch.equal(x, values(rank, size * NUMEL, dtype))
    assert group.stats.compressed == 4
    small = torch.empty(3)
    reduce_scatter_single(small, torch.arange(3.0 * size), op=premul_sum(2.0), group=group)
    assert torch.equal(small, 2.0 * size * torch.arange(3.0 * size).view(size, 3)[rank])
    inputs = [values(each, size * NUMEL, dtype).view(size, -1)[rank] for each in range(size)]
    largest = torch.empty(NUMEL, dtype=dtype)
    reduce_scatter_single(largest, x, op=ReduceOp.MAX, group=group)
    assert torch.equal(largest, torch.stack(inputs).amax(0))
    for scale, got in zip((1.0, 1 / size, 0.5, 1.0), [*found, out], strict=True):
        off = (got.float() - scale * sum(x.float() for x in inputs)).abs()
        # The owner's own values are exact.
        others = [x for each, x in enumerate(inputs) if each != rank]
        assert 0 < float(off.max()) < scale * 1.05 * level(4, others) + DTYPES[dtype]


@on_ranks(3)
def test_all_ranks_gather_the_same_bytes_and_reduce_scatter_codes_every_value_once(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _gathers(rank, dtype)
        _scatters(rank, dtype)


@on_ranks(3)
def test_bytes_sent_are_the_formula_and_several_times_fewer(rank: int) -> None:
    group, numel = group_of(), 1 << 18
    layer = Layer("", 0, (numel,), MinMax())
    whole = Layout.build([layer._replace(name=f"all_reduce of {numel}")], 3, torch.float32)
    parts = part_layout([layer], 3, torch.float32)
    for run, expected, dense in (
        (lambda: dist.all_reduce(values(rank, numel), group=group), whole.sent_bytes(rank), 16 * numel // 3),
        (
            lambda: all_gather_single(torch.empty(3 * numel), values(rank, numel), group=group),
            sent_bytes(parts.reduction_traffic(up=False), rank),
            8 * numel,
        ),
        (
            lambda: reduce_scatter_single(torch.empty(numel), values(rank, 3 * numel), group, ReduceOp.SUM),
            sent_bytes(parts.reduction_traffic(down=False), rank),
            8 * numel,
        ),
    ):
        before = group.stats
        run()
        after = group.stats
        assert after.payload_sent_bytes - before.payload_sent_bytes == expected
        assert after.dense_bytes - before.dense_bytes == dense
        assert 7.0 < dense / expected < 7.2


@on_ranks(2)
def test_draws_are_new_each_time_unbiased_and_leave_the_global_generator_alone(rank: int) -> None:
    group, found = group_of(everything("minmax(bits=2)")), []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(100):
        x = values(rank, 2048)
        dist.all_reduce(x, group=group)
        found.append(x)
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (0, 1):
        x = values(rank, 2048)
        dist.all_reduce(x, group=group_of(everything("minmax(bits=2)", seed=seed)))
        assert torch.equal(x, found[0]) == (seed == 0)
    exact = values(0, 2048) + values(1, 2048)
    assert float((torch.stack(found).mean(0) - exact).norm()) < 0.15 * float((found[0] - exact).norm())
    assert not torch.equal(found[0], found[1])


def _works_as_a_group(rank: int) -> None:
    group = group_of()
    x = values(rank, 4096)
    dist.broadcast(x, 0, group=group)
    assert torch.equal(x, values(0, 4096))
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
    assert group.stats.compressed == 0
    exact = values(0) + values(1)
    assert_near(functional.wait_tensor(functional.all_reduce(values(rank), "avg", group)), exact / 2, 0.2)
    gathered = functional.wait_tensor(functional.all_gather_tensor(values(rank), 0, group))
    assert torch.equal(gathered, torch.cat([values(0), values(1)]))
    part = functional.wait_tensor(functional.reduce_scatter_tensor(values(rank), "sum", 0, group))
    assert torch.equal(part, exact.chunk(2)[rank])
    assert (dist.get_backend(group), dist.get_rank(group), dist.get_world_size(group)) == ("thinwire", rank, 2)
    with pytest.raises(NotImplementedError, match="new_group"):
        group.split_group([0, 1])
    leaf = values(rank).requires_grad_()
    dist.all_reduce(leaf, group=group)
    assert_near(leaf, exact, 0.25)


def _lets_go_of_tensors(rank: int) -> None:
    group = group_of()
    for turn in range(50):
        objects: list = [None, None]
        dist.all_gather_object(objects, (rank, turn), group=group)
        assert objects == [(0, turn), (1, turn)]
        x = torch.full((64,), float(rank))
        dist.broadcast(x, 0, group=group)
        assert float(x.sum()) == 0.0
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0]) + 10 * rank, group=group)
        assert swapped.tolist() == [rank, 10 + rank]
        dist.barrier(group=group)
    # PyTorch calls those of its own that a subclass lacks with the interpreter in its hands.
    header = next((Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp"))
    names = re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text())
    assert "broadcast" in names
    others = {"reconfigure", "endCoalescing", "recvAnysource"}  # which Python calls by other names, or never
    assert all(name in vars(group) or name in vars(ProcessGroup) for name in {*names} - others)


def _serves(rank: int) -> None:
    _works_as_a_group(rank)
    _lets_go_of_tensors(rank)


def test_it_works_as_any_process_group_and_nothing_waits_for_gloos_threads_with_the_interpreter_in_its_hands() -> None:
    """They wait for it, under the lock that a collective needs, where the last to let go of a tensor."""
    run_ranks(_serves, 2)
    run_ranks(_alone, 1)


@on_ranks(2, backend="cpu:thinwire")
def test_it_may_be_the_default_group(rank: int) -> None:
    inherits = dist.new_group()
    assert isinstance(inherits, ProcessGroup)
    assert str(inherits.options.compressor) == str(inherits.options.all_gather) == "minmax(bits=4, bucket=128)"
    assert str(ProcessGroupOptions("cast(bf16)").reduce_scatter) == "raw()"
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for compress in (thinwire.compress, thinwire.compress_ddp):
        with pytest.raises(RuntimeError, match=r"call init_process_group\('gloo'\) for .*register_model\(model\)"):
            compress(model)
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()


def _alone(rank: int) -> None:
    group = group_of()
    x = values(rank)
    dist.all_reduce(x, op=premul_sum(2.0), group=group)
    assert torch.equal(x, 2 * values(0))
    assert group.stats.compressed == 0


WAYS: list[dict[str, str]] = [{"transport": "group"}, *([] if unavailable() else [{"transport": "shared"}])]
WAYS += [{"algorithm": name} for name in ("ring", "tree", "tree(root=1)", "allgather", "parameter_server(server=1)")]


@on_ranks(3)
def test_over_each_transport_and_algorithm_all_ranks_have_the_same_bytes(rank: int) -> None:
    """So they do if tensors are sent as those of a device, which is the CPU here."""
    exact, found = torch.cat([sum(map(values, range(3))), *map(values, range(3))]), []
    for options, device_of in itertools.product(WAYS, (process_group.device_of, lambda x: x.device)):
        group = group_of(everything("minmax(bits=8)", **options))
        x, gathered, part = values(rank), torch.empty(3 * NUMEL), torch.empty(NUMEL)
        on_host, shared = device_of is process_group.device_of, options.get("transport") == "shared"
        with mock.patch.object(process_group, "device_of", device_of):
            if shared and not on_host:
                with pytest.raises(ValueError, match="transport='shared' is memory of the host, and a GPU"):
                    dist.all_reduce(x, group=group)
                continue
            dist.all_reduce(x, group=group)
            all_gather_single(gathered, values(rank), group=group)
            reduce_scatter_single(part, gathered, group, ReduceOp.SUM)
        stats = group.stats
        assert "transport" not in options or stats.payload_shared_bytes == (stats.payload_sent_bytes if shared else 0)
        found.append(torch.cat([x, gathered, part]))
        assert_near(found[-1][: exact.numel()], exact, 0.03)
        assert on_host or torch.equal(found[-1], found[-2])
        assert "transport" not in options or torch.equal(found[-1], found[0])
    assert_alike(*(each[: exact.numel()] for each in found))


@on_ranks(2)
def test_ranks_that_differ_are_reported(rank: int) -> None:
    with pytest.raises(DisagreementError, match=r"compressor: minmax\(bits=4"):
        group_of(everything(f"minmax(bits={4 + rank})"))
    with pytest.raises(TypeError, match="ProcessGroupOptions"):
        dist.new_group(backend="thinwire", pg_options={"bits": 4})
    group = group_of()
    with pytest.raises(DisagreementError, match="all_reduce of 5000 elements"):
        dist.all_reduce(values(rank, NUMEL + rank), group=group)
    x = values(rank)
    dist.all_reduce(x, group=group)
    with pytest.raises(DisagreementError, match="layer weight"):
        group.register_model(torch.nn.Linear(4 + rank, 4))


def _dies(rank: int) -> bool:
    # Groups of a part of the world: a dead rank has its number in the default group.
    groups = [dist.new_group(ranks, backend="thinwire", pg_options=everything()) for ranks in ([0, 2], [1])]
    dist.barrier()
    if rank == 1:
        return True
    x = values(rank)
    dist.all_reduce(x, group=groups[0])
    if rank == 2:
        os._exit(1)
    texts = []
    for work in [dist.all_reduce(values(rank), group=groups[0], async_op=True) for _ in range(3)]:
        with pytest.raises(TransportError) as error:
            work.wait()
        assert (error.value.rank, error.value.host) == (2, socket.gethostname())
        assert error.value.reason == "its process has ended"
        texts.append(str(error.value))
        assert not work.is_success()
    assert "restart from the last checkpoint" in texts[0].lower()
    assert "the link broke earlier" in texts[-1]
    return True


def test_a_dead_rank_is_an_error_for_the_others() -> None:
    assert run_ranks(_dies, 3, may_die=True) == [True, True, None]


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


TORCHCOMMS = {
    "__init__.py": """is_backend_built = "gloo".__eq__
def new_comm(backend, *_, **__):
    from importlib.metadata import entry_points
    (found,) = entry_points(group="torchcomms.backends", name=backend)
    found.load()""",
    "_comms.py": '_BackendWrapper, _is_backend_registered = object, "gloo".__eq__',
    "hooks.py": "FlightRecorderHook = object",
}
"""What PyTorch imports of torchcomms, which loads backends as the real one does."""

_ASKING = """import torch.distributed as dist, thinwire
for ask in (lambda: dist.init_process_group("cpu:thinwire", store=dist.HashStore(), rank=0, world_size=1),
            thinwire.ProcessGroupOptions):
    try: ask()
    except RuntimeError as error: print(error)"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.13 asks torchcomms in this way")
def test_where_torchcomms_makes_the_groups_the_backend_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torchcomms").mkdir()
    for name, source in TORCHCOMMS.items():
        (tmp_path / "torchcomms" / name).write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    told = subprocess.check_output([sys.executable, "-W", "ignore", "-c", _ASKING], env=environment, text=True)
    # From 2.15 on PyTorch asks torchcomms only for the backends that it has.
    expected = [True, True] if torch.__version__ < "2.15" else []
    assert ["torchcomms has no backend thinwire" in line for line in told.splitlines()] == expected
