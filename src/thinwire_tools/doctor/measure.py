"""Measurements of doctor other than steps: links, codecs, processors."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Transport, World, with_shared_memory
from thinwire.compressors import Compressor
from thinwire.integrations.options import Network
from thinwire.integrations.transports import bare_transport, carried, exchange_device, trained
from thinwire.plan import named_parameters
from thinwire.plan.cost import codec_seconds
from thinwire.plan.forecast import Links
from thinwire.runtime.probe import (
    Pair,
    find_nodes,
    measure_codecs,
    measure_cores,
    measure_links,
    measure_pairs,
    shared_part,
)
from thinwire_tools.doctor.forecast import ShardedPace, shares
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.watched import DoctorError, Watched

_ROUTES = Path("/proc/net/route")
_INTERFACES = Path("/sys/class/net")
_ROUNDS = 4
"""Number of times that links are measured, whose spread is the verdict's doubt."""


@dataclass(frozen=True)
class Measured:
    """Measurements from which predictions are made."""

    watched: Watched
    links: tuple[Links, ...]
    """Measurements of the links, one for each time."""
    pairs: tuple[Pair, ...]
    codecs: Mapping[Compressor, tuple[float, float]]
    """Seconds in which the slowest rank encodes an element, and decodes one."""
    num_ranks: int
    nodes: int
    cores: float
    """Number of CPU cores per rank."""
    threads: int
    """Number of threads that each rank computes with."""
    line_rate: float | None
    """Rate that the interface is made for, in bytes per second, where that is known."""
    interface: str

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered and gradients reduced in shards, rather than all-reduced."""
        return isinstance(self.watched.paces[0], ShardedPace)

    @property
    def crossings(self) -> float:
        """Ratio of the bytes that a rank sends to those of an uncompressed buffer."""
        once = (self.num_ranks - 1) / self.num_ranks
        return once if self.sharded else 2 * once

    def codec_s(self, compressor: Compressor) -> float:
        """Return the seconds that an element costs a rank each time it is sent, for encoding and decoding."""
        encode, decode = self.codecs[compressor]
        if self.sharded:
            encoded, decoded = shares("all_gather", self.num_ranks)
            return encoded * encode + decoded * decode
        return codec_seconds(compressor, self.num_ranks, {"encode": encode, "decode": decode})


def measure(observer: Observer, compressors: Collection[Compressor], line_rate: float | None = None) -> Measured:
    """Measure links and codecs, between two steps and on every rank of the model's process group.

    Raises:
        DoctorError: no steps were watched that can be predicted.
        TransportError: a rank is gone or silent.
    """
    watched, group = observer.result(), observer.group
    try:
        model = observer.model
        assert model is not None
        parameters = trained(model) if isinstance(model, DistributedDataParallel) else named_parameters(model)
        device = exchange_device(parameters, group, as_device=False)
    except (RuntimeError, NotImplementedError) as error:
        raise DoctorError(str(error)) from error
    host = bare_transport(group)
    transport: Transport = host if device is None else carried(host, group, Network(), device)
    try:
        pairs = measure_pairs(transport)
        nodes = find_nodes(transport)
        cores = measure_cores(transport)
        # Coded messages are sent by the transport that thinwire.compress() would use.
        transport = with_shared_memory(host, host.timeout) if device is None else transport
        links = [measure_links(transport, world=World(len(nodes), nodes)) for _ in range(_ROUNDS)]
        codecs = measure_codecs(compressors, transport)
        rates = torch.tensor([line_rate or interface_rate() or 0.0], dtype=torch.float64, device="cpu")
        slowest = float(transport.all_gather(rates).min())
    finally:
        transport.close()
    threads = torch.get_num_threads()
    shared = shared_part(cores, threads) if device is None else 0.0
    paces: Any = tuple(replace(pace, shared=shared) for pace in watched.paces)
    return Measured(
        replace(watched, paces=paces),
        tuple(links),
        tuple(pairs),
        codecs,
        dist.get_world_size(group),
        len(set(nodes)),
        cores,
        threads,
        slowest or None,
        interface_name(),
    )


def over_links(measured: Measured, rate: float) -> Measured:
    """Return the same training and processors over links of ``rate`` bytes per second each way."""
    return replace(measured, links=tuple(links.at_rate(rate) for links in measured.links))


def interface_name() -> str:
    """Return the network interface that gloo is configured to use, or that of the default route; empty if unknown."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return named
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if row[1] == "00000000"), "")


def interface_rate(name: str | None = None) -> float | None:
    """Return the rate of the line behind an interface, as its driver says, in bytes per second; None if unknown."""
    place = _INTERFACES / (interface_name() if name is None else name)
    # Virtual ones, such as veth, name a speed that nothing keeps to.
    if not (place / "device").exists():
        return None
    try:
        mbit = int((place / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit * 1e6 / 8 if mbit > 0 else None
