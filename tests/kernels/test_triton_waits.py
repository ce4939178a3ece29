"""No host waits for a device: whole steps of a Wire on tensors that refuse to be looked at, kernels interpreted."""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
import threading

import pytest
import torch

from device_cases import PART_NUMEL, sharded_case
from harness import run_threads
from pretend import DEVICE, Pretend, Pretended, Waits
from thinwire import kernels
from thinwire.collectives import (
    CollectiveCall,
    DeviceBuffers,
    DeviceLoopbackTransport,
    LoopbackTransport,
    device_all_gather,
    parse_algorithm,
)
from thinwire.kernels import native
from thinwire.plan import Plan
from thinwire.runtime import BucketEngine, Wire, WireSettings

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from triton_cases import interpreted, quiet

SHAPES = {"a": (30, 40), "b": (3,), "c": (40, 60), "d": (9, 11)}
STEADY = [
    *("ef(minmax(bits=2))", "raw", "lattice(bits=4)", "qsgd(bits=4)"),
    *("terngrad(clip=2.5, bucket=128)", "ef(onebit(bucket=64))", "ef(sign(majority=True, bucket=64))", "natural"),
    *("rangefloat(bits=8)", "levels(bits=3, min_numel=0)", "cast(bf16)", "ef(randk(density=0.1))"),
    *("ef(powersgd(rank=2))", "truncate(gamma=4)", "ef(intsgd(bits=32, block=global))", "heuristic_intsgd"),
]
"""What runs without a wait from step to step. What learns (levels, range floats) waits where it does."""

IN_ROUNDS = ("ring", "tree", "hierarchical(inside=minmax(bits=8))")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take tensors of the device; a host's numbers may not go there by way of `torch.tensor`."""
    from triton.runtime.interpreter import GridExecutor

    one_at_a_time, launch = threading.Lock(), GridExecutor.__call__

    def launch_alone(self, *args, **options):
        with one_at_a_time:
            return launch(self, *(a.held if isinstance(a, Pretended) else a for a in args), **options)

    tensor = torch.tensor

    def checked(data, **options):
        where = torch.device(options.pop("device", None) or "cpu")
        if where != DEVICE:
            return tensor(data, **options)
        if getattr(_thread, "strict", False):
            raise Waits("torch.tensor copies between host and device")
        return tensor(data, **options).to(where)

    monkeypatch.setattr(GridExecutor, "__call__", launch_alone)
    for where in (native, kernels):
        monkeypatch.setattr(where, "asynchronous", lambda t: isinstance(t, Pretended))
        monkeypatch.setattr(where, "to_device", lambda values, device: values.to(device, non_blocking=True))
    monkeypatch.setattr(torch, "tensor", checked)


_thread = threading.local()


def steps(
    spec: str, transport, num_steps: int, poison: int = -1, algorithm: str = "sra"
) -> tuple[int, list[torch.Tensor]]:
    """Backward passes of a Wire on one rank, of which the third and later ones may not wait.

    How many steps were not finite, and what came out.
    """
    with Pretend() as mode:
        plan = Plan.build(SHAPES, spec)
        wire = Wire(BucketEngine(plan, SHAPES, transport, WireSettings(algorithm=parse_algorithm(algorithm))))
        found = []
        for step in range(num_steps):
            mode.strict = _thread.strict = step >= 2
            wire.engine.begin_step()
            for names in (("c", "d"), ("a", "b")):
                layers = tuple((name, SHAPES[name]) for name in names)
                numel = sum(math.prod(shape) for _, shape in layers)
                generator = torch.Generator().manual_seed(10 * step + transport.rank)
                held = torch.randn(numel, generator=generator)
                if step == poison and transport.rank == 1:
                    held[7] = torch.inf
                flat = Pretended(held)
                assert wire.engine.reduce(flat, layers, loss_scale=2.0).wait() is flat
                found.append(held)
        mode.strict = _thread.strict = False
        wire.state_dict()
        return wire.stats.nonfinite_steps, found


def run(spec: str, num_steps: int = 3, *, ranks: int = 2, **options) -> list[tuple[int, list[torch.Tensor]]]:
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(ranks), DEVICE)
    return run_threads(lambda t: steps(spec, devices[t.rank], num_steps, **options), ranks, timeout_s=100.0)


@interpreted
@quiet
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("spec", "options"),
    [(spec, {}) for spec in STEADY] + [("ef(minmax(bits=4))", {"ranks": 3, "algorithm": name}) for name in IN_ROUNDS],
)
def test_a_steady_step_waits_for_nothing(spec: str, options: dict) -> None:
    one, *_, other = run(spec, **options)
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@interpreted
@quiet
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("algorithm", ["sra", "ring"])
def test_what_was_sent_is_kept_without_a_wait(algorithm: str) -> None:
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(2), DEVICE)

    def gathers(host) -> list[torch.Tensor]:
        layout, kept, found = sharded_case("minmax(bits=4)", 2, algorithm), {}, []
        x = torch.randn(2 * PART_NUMEL, generator=torch.Generator().manual_seed(host.rank))
        with Pretend() as mode:
            way = layout, devices[host.rank], DeviceBuffers.allocate(layout, host.rank, DEVICE, up=False)
            for step in range(3):
                mode.strict = _thread.strict = step > 1
                device_all_gather(Pretended(x), *way, CollectiveCall(seed=1, step=step, scale=1.0), kept=kept)
                found.append(x.clone())
            mode.strict = _thread.strict = False
        return found

    for first, *later in run_threads(gathers, 2, timeout_s=100.0):
        assert all(torch.equal(first, again) for again in later)


@interpreted
@quiet
@pytest.mark.usefixtures("device")
def test_a_step_that_is_not_finite_is_found_without_a_wait() -> None:
    for nonfinite, _ in run("ef(minmax(bits=4))", 5, poison=3):
        assert nonfinite == 1


@interpreted
@quiet
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "spec", ["levels(bits=3, min_numel=0, learn_at=(2,))", "ef(fft(theta=0.85))", "ef(topk(density=0.1))"]
)
def test_what_is_known_to_wait_does(spec: str) -> None:
    """So the test above can fail."""
    with pytest.raises((Waits, RuntimeError), match=r"looks at a value|copies between|counts what|tolist"):
        run(spec)
