"""Warnings of compressors that train badly under optimizers that divide by the size of past gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.arguments import warn_caller
from thinwire.compressors import DGC, FFT, Chain, Compressor, OneBit, RandK, Sign, Sparsifier, Wrapper
from thinwire.optim import CompressedAdamW
from thinwire.plan import Plan

_ADAM_LIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


def check_holds_all(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` if ``optimizer`` lacks one of the ``parameters``, by name, that are trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lacking = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if lacking:
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} lacks {lacking[0]}: give it all trained parameters of the model, {kind}(model.parameters(), ...)"
        )


def warn_of_pairing(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if ``optimizer`` is Adam or a relative and the plan has `DGC`, or error feedback around one bit, signs or a
    sparse choice of the gradient.

    Late values arrive as spikes and inflate Adam's second moment; one bit makes it nearly equal for all values of a
    bucket, so that preconditioning is lost (1-bit Adam, Tang et al. 2021, section 3). DGC keeps a momentum of its
    own, which Adam's would double (Lin et al. 2018, section 3).
    """
    if isinstance(optimizer, CompressedAdamW):
        _warn_of_order(plan, optimizer)
    if not isinstance(optimizer, _ADAM_LIKE):
        return
    name = type(optimizer).__name__
    for compressor in dict.fromkeys(plan.layers.values()):
        if isinstance(compressor, DGC):
            problem = f"it has its own momentum, and {name} adds another: use torch.optim.SGD(..., momentum=0)"
        elif _spikes(compressor):
            order = ', order="update"' if _sparse(compressor) else ""
            problem = (
                f"error feedback on gradients inflates the second moment of {name}: use thinwire.optim.CompressedAdamW"
                f"(model.parameters(), ...{order}), or minmax(bits=4) without feedback, or this compressor under "
                "torch.optim.SGD"
            )
        else:
            continue
        warn_caller(f"{compressor} trains badly under {name}: {problem}")


def _warn_of_order(plan: Plan, optimizer: CompressedAdamW) -> None:
    """Warn of sparse choices under ``order="pre"``: the momentum has forgotten a value before the next one is sent."""
    if all(group["order"] == "update" for group in optimizer.param_groups):
        return
    for compressor in dict.fromkeys(plan.layers.values()):
        if _sparse(compressor):
            warn_caller(
                f'{compressor} trains badly under CompressedAdamW(order="pre"), whose momentum forgets values that are '
                'sent seldom: use CompressedAdamW(..., order="update")'
            )


def _spikes(compressor: Compressor) -> bool:
    """Return whether a compressor sends one bit, signs or a sparse choice, with error feedback."""
    if not isinstance(compressor, Wrapper):
        return False
    inner = compressor.inner
    if isinstance(inner, RandK):
        return not inner.traits.dense
    one_bit = isinstance(inner, OneBit | Sign) or getattr(inner, "bits", None) == 1
    return one_bit or _sparse(compressor)


def _sparse(compressor: Compressor) -> bool:
    """Return whether a compressor sends a sparse choice."""
    return isinstance(compressor.inner if isinstance(compressor, Wrapper) else compressor, Sparsifier | Chain | FFT)
