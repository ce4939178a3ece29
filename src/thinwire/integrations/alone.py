"""Attachment to a model in a world of one rank, where nothing is sent and the handle exists all the same."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import LoopbackTransport
from thinwire.integrations.ddp import Options, of_optimizer, rules_of
from thinwire.integrations.options import check_optimizer
from thinwire.plan import Plan, named_parameters
from thinwire.runtime import BucketEngine, Wire, WireSettings


def is_alone() -> bool:
    """Return whether this process is the only rank.

    Before ``init_process_group`` the variable ``WORLD_SIZE`` of launchers such as torchrun decides, so that a script
    that only forgot to call it does not train alone by mistake.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return int(os.environ.get("WORLD_SIZE") or 1) == 1


def attach_alone(module: nn.Module, options: Options) -> Wire:
    """Return the `Wire` of a module that no other rank trains.

    Nothing is attached to ``module``. The Wire has the plan that the arguments ask for, which are checked as usual, and
    it loads and saves checkpoints of worlds of any size. It counts no steps, because nothing is sent in any.
    """
    parameters: dict[str, Tensor] = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters.items()}
    rules, _ = rules_of(options)
    check_optimizer(options.optimizer, module)
    # Several ranks that resume from this one's checkpoint take its plan and start with its moments.
    plan = Plan.build(shapes, rules, options.filter(module))
    _, preconditioned, plan = of_optimizer(plan, parameters, options)
    (transport,) = LoopbackTransport.world(1)
    settings = WireSettings(seed=options.seed, start=options.start)
    dtypes = {name: p.dtype for name, p in parameters.items()}
    wire = Wire(BucketEngine(plan, shapes, transport, settings, optimizer=options.optimizer, dtypes=dtypes))
    wire.moments = preconditioned
    return wire
