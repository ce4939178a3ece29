"""On a GPU: the same bytes as on a CPU, over NCCL and among ranks that share it, and nobody waits.

Where there is none these tests are skipped, and the same code runs on CPU tensors (test_device.py, test_device_ddp.py)
and in Triton's interpreter (test_triton_device.py, test_triton_waits.py). On a machine with a GPU::

    python -m pytest tests/kernels/test_cuda.py tests/kernels/test_triton*.py

runs everything on it, and with two or more GPUs the training across them as well.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from first_gpu import as_if_there_were_others
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from device_cases import MIXED, SHAPES, check_shards_alike, check_the_default_group, check_ways_alike, layers_of
from harness import run_ranks, run_threads
from nets import Net, assert_replicas_identical, batch, loss_of, train
from thinwire.collectives import DeviceLoopbackTransport, Layout, LoopbackTransport, parse_algorithm
from thinwire.compressors import CodecCall, Coded, Key, Piece, Segments, first_state, parse
from thinwire.integrations import process_group
from thinwire.integrations.group_contents import BufferContents
from thinwire.plan import Plan
from thinwire.runtime import BucketEngine, Wire
from thinwire.runtime.executor import Job, StreamExecutor
from thinwire_tools.cli import main

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: see this file's first lines"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton"),
    pytest.mark.timeout(600),  # kernels are compiled on first use
]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

TIMEOUT = timedelta(seconds=120)


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def over_nccl(function, num_ranks: int, *args) -> list:
    return run_ranks(function, num_ranks, *args, backend="nccl", timeout_s=500.0, group_timeout_s=120.0)


def _trains(rank: int, spec: str) -> None:
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    if dist.get_world_size() == 1:
        as_if_there_were_others()
    model = DDP(Net().cuda(), device_ids=[rank], bucket_cap_mb=0.05)
    wire = thinwire.compress(model, spec, skip_if_slower=False)
    losses = train(model, rank, 20, lr=0.03)
    assert_replicas_identical(model)
    assert (wire.stats.steps, str(wire.engine.device)) == (20, f"cuda:{rank}")
    assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
    wire.detach()
    wire = thinwire.compress(model, spec, simulate=True)
    assert all(math.isfinite(loss) for loss in train(model, rank, 6, lr=0.03))
    assert wire.stats.steps == 6
    # Over a process group, as if there were others: one rank alone sends everything raw.
    with mock.patch.object(process_group, "BufferContents", lambda options, _: BufferContents(options, 2)):
        group = dist.new_group(backend="thinwire")
    model = DDP(Net().cuda(), device_ids=[rank], process_group=group)
    thinwire.register_model(model)
    assert all(math.isfinite(loss) for loss in train(model, rank, 6, lr=0.03))
    assert group.stats.compressed >= 6


@pytest.mark.parametrize("spec", ["minmax(bits=4)", "ef(topk(density=0.1))"])
def test_a_world_of_one_trains_and_simulates(spec: str) -> None:
    over_nccl(_trains, 1, spec)


def _ends_as_the_cpu(rank: int) -> None:
    torch.cuda.set_device(rank)
    check_the_default_group(gpu())


@pytest.mark.parametrize("most", [1, pytest.param(4, marks=several)])
def test_ranks_over_nccl_end_with_the_bytes_of_the_cpu(most: int) -> None:
    over_nccl(_ends_as_the_cpu, min(most, torch.cuda.device_count()))


@several
@pytest.mark.parametrize("spec", ["ef(minmax(bits=4))", "ef(topk(density=0.1))", "natural"])
def test_training_across_gpus(spec: str) -> None:
    over_nccl(_trains, min(4, torch.cuda.device_count()), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu_end_with_the_bytes_of_the_cpu(num_ranks: int, dtype: torch.dtype) -> None:
    algorithm = parse_algorithm("ring" if dtype == torch.bfloat16 else "sra")
    layers = layers_of(MIXED, (*SHAPES, (3000, 10), (200_000,)))
    check_ways_alike(Layout.build(layers, num_ranks, dtype, algorithm), 3, gpu())


@pytest.mark.parametrize("spec", ["minmax(bits=8, bucket=1024)", "ef(minmax(bits=3))", "lattice(bits=6)", "raw"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_on_a_gpu_end_with_the_bytes_of_the_cpu(num_ranks: int, spec: str) -> None:
    check_shards_alike(spec, num_ranks, gpu())


def _shards_over_nccl(rank: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 192), torch.nn.Tanh(), torch.nn.Linear(192, 64)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wire = thinwire.compress(model, skip_if_slower=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert wire.stats.reductions == 12
    assert losses[-1] < losses[0]


@several
def test_fsdp_over_nccl() -> None:
    over_nccl(_shards_over_nccl, min(4, torch.cuda.device_count()))


STEADY = ["minmax(bits=4)", "ef(minmax(bits=2))", "qsgd(bits=4)", "natural", "ef(sign)", "ef(randk(density=0.1))",
          "ef(powersgd(rank=2))", "rangefloat(bits=8)", "levels(bits=3, min_numel=0)"]  # fmt: skip


def steps_of_wires(spec: str, num_steps: int, poison: int = -1, strict: bool = True) -> list[tuple[int, list]]:
    """Steps of two ranks' Wires on one GPU; from the third on PyTorch raises where the host would wait for it."""
    shapes = {"a": (300, 50), "b": (3,), "c": (400, 100), "d": (9, 11)}
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(2), gpu(), timeout_s=300.0)
    together = threading.Barrier(2)

    def run(transport) -> tuple[int, list]:
        torch.cuda.set_device(gpu())
        wire = Wire(BucketEngine(Plan.build(shapes, spec), shapes, devices[transport.rank]))
        found = []
        for step in range(num_steps):
            flats = []
            for names in (("c", "d"), ("a", "b")):
                numel = sum(math.prod(shapes[name]) for name in names)
                values = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + transport.rank))
                if step == poison and transport.rank == 1:
                    values[7] = torch.inf
                flats.append((values.to(gpu()), tuple((name, shapes[name]) for name in names)))
            torch.cuda.synchronize()
            together.wait(300)
            if step >= 2 and strict:
                torch.cuda.set_sync_debug_mode("error")
            together.wait(300)
            wire.engine.begin_step()
            futures = [wire.engine.reduce(flat, layers, loss_scale=2.0) for flat, layers in flats]
            results = [future.wait() for future in futures]
            together.wait(300)
            torch.cuda.set_sync_debug_mode("default")
            together.wait(300)
            found += [result.cpu() for result in results]
        wire.state_dict()
        return wire.stats.nonfinite_steps, found

    return run_threads(run, 2, timeout_s=400.0)


@pytest.mark.parametrize("spec", STEADY)
def test_a_steady_step_waits_for_nothing(spec: str) -> None:
    (_, one), (_, other) = steps_of_wires(spec, 4)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_that_is_not_finite_is_found() -> None:
    for nonfinite, _ in steps_of_wires("ef(minmax(bits=4))", 5, poison=3):
        assert nonfinite == 1


@pytest.mark.parametrize("spec", ["ef(fft(theta=0.85))", "ef(topk(density=0.1))", "ef(globaltopk(density=0.05))"])
def test_what_waits_runs(spec: str) -> None:
    steps_of_wires(spec, 3, strict=False)


class LongJob(Job):
    """Tens of milliseconds of work on whatever stream is current."""

    def __init__(self, x: torch.Tensor, done: torch.cuda.Event) -> None:
        self.x, self.done = x, done

    def start(self) -> None:
        """Nothing is sent."""

    def finish(self) -> torch.Tensor:
        y = self.x
        for _ in range(30):
            y = y @ self.x
        self.done.record(torch.cuda.current_stream())
        return y


def test_backward_goes_on_while_a_bucket_is_reduced() -> None:
    """Neither the host nor the current stream waits for the job; who waits for the future comes after it."""
    worker, x = StreamExecutor(gpu()), torch.randn(8192, 8192, device=gpu()) / 100
    (x @ x).sum().item()
    done, passed = (torch.cuda.Event() for _ in range(2))
    started = time.perf_counter()
    future = worker.submit(LongJob(x, done))
    handed_over_s = time.perf_counter() - started
    passed.record(torch.cuda.current_stream())
    passed.synchronize()
    assert not done.query(), "the current stream waited for the job"
    future.wait()
    after = torch.cuda.Event()
    after.record(torch.cuda.current_stream())
    after.synchronize()
    assert done.query(), "what followed the future did not wait for it"
    assert handed_over_s < time.perf_counter() - started
    worker.call(lambda: None)


def _scales(rank: int) -> None:
    """An fp16 training with a GradScaler, whose scale the hook learns without asking for it in backward."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    as_if_there_were_others()
    model = DDP(Net().cuda(), device_ids=[rank], bucket_cap_mb=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
    wire = thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False, grad_scaler=scaler)
    told, reduce = [], wire.engine.reduce

    def noting(flat, layers, *, loss_scale: float):
        told.append(loss_scale)
        return reduce(flat, layers, loss_scale=loss_scale)

    wire.engine.reduce = noting  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, batch(rank, step).cuda())
        before = len(told)
        scaler.scale(loss).backward()
        assert set(told[before:]) == {scales[-1]}
        scaler.step(optimizer)
        scaler.update()
    assert scales[0] == 256.0 < scaler.get_scale()


def test_the_loss_scale_is_the_scalers() -> None:
    over_nccl(_scales, 1)


@pytest.mark.parametrize("spec", ["minmax(bits=4)", "ef(minmax(bits=4))", "raw"])
def test_the_number_of_launches_does_not_depend_on_that_of_layers(spec: str) -> None:
    from thinwire_tools.bench.cuda import launches

    compressor, found = parse(spec), []
    assert isinstance(compressor, Coded)
    for num_layers in (3, 60):
        pieces, at = [], 0
        for i in range(num_layers):
            pieces.append(Piece(f"layer{i}", 5000 * i, 5000, 0, at, (5000,)))
            at += compressor.payload_bytes(5000, torch.float32)
        segments, x = Segments.build(pieces), torch.randn(5000 * num_layers, device=gpu())
        message, state = torch.zeros(at, dtype=torch.uint8, device=gpu()), first_state(compressor, x, segments)

        def encode(x=x, segments=segments, message=message, state=state) -> None:
            compressor.encode(x, message, CodecCall(segments, Key.derive(1), state=state))

        encode()
        found.append(launches(encode, gpu()))
    assert found[0] == found[1] <= 1


def test_bench_cuda(tmp_path) -> None:
    path = tmp_path / "cuda.json"
    assert main(["bench", "cuda", "--size-mb", "4", "--repeats", "2", "--ranks", "2", "--json", str(path)]) == 0
    assert "minmax(bits=4): encode" in path.read_text()
