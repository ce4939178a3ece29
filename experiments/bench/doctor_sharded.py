"""Sharded models for ``python -m experiments bench doctor``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

import thinwire
from thinwire_tools.compare.gpt import GPT, GPTConfig
from thinwire_tools.doctor.settings import Setting
from thinwire_tools.doctor.settings_sharded import ShardedSetting


def sharded_gpt(*, halved: bool = False, kept: bool = False) -> nn.Module:
    """The demo's GPT under FSDP2, block by block, the same each time and on every rank.

    ``halved``: PyTorch reduces gradients in bf16. ``kept``: weights stay gathered after forward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second that only this is worth

    torch.manual_seed(0)
    model = GPT(GPTConfig())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if halved else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=not kept)
    fully_shard(model, mp_policy=policy)
    return model


def sharded_way(setting: Setting) -> tuple[nn.Module, Callable[[], object]]:
    """A model that trains like this, and what ends its communication."""
    if not isinstance(setting, ShardedSetting):
        from experiments.papers.qsdp.sharding import cut_short

        model = sharded_gpt()
        cut_short(model, math.inf, math.inf)
        return model, lambda: None
    model = sharded_gpt(halved=setting.halved, kept=setting.kept)
    if setting.spec is None:
        return model, lambda: None
    gradients = setting.gradients or setting.spec
    wire = thinwire.compress(model, weights=setting.spec, gradients=gradients, skip_if_slower=False)
    thinwire.prefetch(model)
    return model, wire.detach
