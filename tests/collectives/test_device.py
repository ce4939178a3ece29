"""The way through a device, on CPU tensors: the same bytes as the CPU's own way, over threads and over gloo."""

from __future__ import annotations

import pytest
import torch
from test_algorithms import SPECS, laid_out
from test_laws import FAMILIES

from device_cases import CPU, MIXED, SHAPES, check_the_default_group, check_ways_alike, layers_of, through_the_device
from harness import on_ranks, run_threads
from thinwire import TransportError, parse
from thinwire.collectives import DeviceBuffers, DeviceLoopbackTransport, Layout, LoopbackTransport, parse_algorithm
from thinwire.collectives.rounds import Rounds
from thinwire.compressors import Coded, Summed

FIXED = [spec for spec in FAMILIES if isinstance(parse(spec), Coded | Summed) and not parse(spec).traits.bounded]


@pytest.mark.parametrize("spec", FIXED)
def test_the_bytes_of_the_cpu(spec: str) -> None:
    check_ways_alike(Layout.build(layers_of([spec]), 3, torch.float32), 3)


@pytest.mark.parametrize("spec", SPECS)
def test_every_algorithm_and_slices(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.collectives.layout.SLICE", 8192)
    layers = layers_of([*MIXED, "intsgd(bits=8)"], (*((3000, 10), (70, 50), (5000,), (7,)), *SHAPES[-4:] * 2))
    layout = laid_out(spec, 7, layers, torch.bfloat16)
    assert len(layout.chunks) + len(layout.gathered) > 4
    check_ways_alike(layout, 2)


def test_partial_sums_that_may_overflow_unseen_are_refused() -> None:
    for algorithm in ("ring", "tree"):
        layout = Layout.build(layers_of(["minmax"]), 4, torch.float16, parse_algorithm(algorithm))
        with pytest.raises(ValueError, match="between devices no rank can tell"):
            DeviceBuffers.allocate(layout, 0, CPU)
        Rounds(layout, 0, CPU, up=False)


def test_means_of_very_different_sizes_are_not_padded() -> None:
    """One owner has almost everything: gathered in equal room, its bytes would travel four times over."""
    layout = Layout.build(layers_of(["sign(majority=True)"], ((100, 100), (5,))), 4, torch.float32)
    buffers = DeviceBuffers.allocate(layout, 0, CPU)
    assert not buffers.padded
    assert buffers.means.numel() == sum(buffers.sizes)
    check_ways_alike(layout, 2)
    even = DeviceBuffers.allocate(Layout.build(layers_of(["minmax"], ((64, 1024),)), 4, torch.float32), 0, CPU)
    assert even.padded


def test_not_a_number_reaches_every_rank_and_a_rank_by_itself_ends_with_its_own_codes() -> None:
    layout = Layout.build(layers_of(MIXED), 3, torch.float32)
    for at in (0, 4000, layout.numel - 1):
        check_ways_alike(layout, 1, poison=at)
    layout = Layout.build(layers_of(["minmax(bits=3)", "raw", "ef(onebit)"]), 1, torch.float32)
    check_ways_alike(layout, 2)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    layout = Layout.build(layers_of(["minmax"]), 3, torch.float32)
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(3), CPU, timeout_s=0.5)

    def run(transport) -> str:
        if transport.rank == 2:
            return ""
        with pytest.raises(TransportError) as raised:
            through_the_device(devices[transport.rank], layout, 1)
        return str(raised.value)

    assert all("a rank did not come" in text for text in run_threads(run, 3)[:2])


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_the_bytes_of_the_cpu_over_gloo_and_a_collective_that_cannot_be_started(rank: int, size: int) -> None:
    transport, room = check_the_default_group(), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TypeError, match="all_to_all"):
        transport.send(room, 0, 0)
    with pytest.raises(TransportError, match="the all-to-all failed"):
        transport.all_to_all(room, room, [4] * size, [3] * size)
