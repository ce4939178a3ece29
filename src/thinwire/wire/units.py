"""What FSDP communicates together: the layers of one module, as weights and as gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.collectives import DeviceTransport, Transport
from thinwire.compressors import Coded
from thinwire.plan import Plan, Site, at_site
from thinwire.wire.sharded_slots import ShardedSlots
from thinwire.wire.shards import Placement, ShardedLayer


class Members:
    """The layers of a unit that take part in one kind of collective, and their slots."""

    def __init__(self, site: Site, layers: Sequence[ShardedLayer], transport: Transport) -> None:
        self.site: Site = site
        self.names = tuple(layer.name for layer in layers)
        num_ranks = layers[0].num_ranks if layers else 1
        self.placement = Placement([replace(layer, name=at_site(site, layer.name)) for layer in layers], num_ranks)
        device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
        self.slots = ShardedSlots(self.placement, transport.rank, device, sends_all=site == "gradients")

    def follow(self, plan: Plan) -> None:
        self.slots.follow(self.compressors(plan))

    def compressors(self, plan: Plan) -> dict[str, Coded]:
        """By name in the plan, which `sharded_plan` has checked."""
        found = {}
        for name in self.placement.by_name:
            compressor = plan[name]
            assert isinstance(compressor, Coded)
            found[name] = compressor
        return found


@dataclass
class Unit:
    """Parameters that are gathered together, and their gradients reduced together: those of one FSDP module."""

    name: str
    layers: tuple[ShardedLayer, ...]
    transport: Transport
    """Among the ranks that it is sharded over."""
    trained: tuple[str, ...]
    """Those of its layers that get gradients."""
    index: int = 0
    first_rank: int = 0
    """The first of the ranks that it is sharded over: replicas of it draw by themselves."""
    reductions: int = 0
    """So far: the draws of gradients depend on it."""
    across: int = 0
    """Sums over replicas so far."""
    last_step: int = -1
    kept: dict[int, Tensor] = field(default_factory=dict)
