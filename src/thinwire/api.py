"""`thinwire.compress`: one call for DistributedDataParallel models, sharded models and stages of a pipeline."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import close_names
from thinwire.compat import is_replicated, uncompiled
from thinwire.integrations.ddp import Options, attach_alone, attach_ddp, is_alone
from thinwire.integrations.options import Checks, Network
from thinwire.integrations.transports import fail_before_meeting
from thinwire.plan import Rules
from thinwire.policies import Auto, Policy
from thinwire.runtime import Wire, on_the_host

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from thinwire.pipeline.stage import CompressedStage


@overload
def compress(model: PipelineStage, **options: Any) -> CompressedStage: ...
@overload
def compress(model: nn.Module, compressor: Rules | Auto | None = None, **options: Any) -> Wire: ...


def compress(model: Any, compressor: Any = None, **options: Any) -> Wire | CompressedStage:
    """Compress what ``model`` sends while it trains. Call this once on every rank, after the model is wrapped.

        model = DistributedDataParallel(model)
        wire = thinwire.compress(model)
        wire = thinwire.compress(model, {"embed.*": "2bit", "*": "4bit"})

        fully_shard(model)  # FSDP2: gradients, and weights by their default
        wire = thinwire.compress(model, "minmax(bits=4, bucket=1024)")

        stage = PipelineStage(...)  # activations and their gradients
        stage = thinwire.compress(stage, forward="delta(maxabs(bits=4))")

    The arguments, the result and the exceptions are those of `compress_ddp` for a ``DistributedDataParallel`` model, of
    `compress_fsdp` for a model under ``torch.distributed.fsdp.fully_shard``, and of `compress_stage` for a
    ``torch.distributed.pipelining.PipelineStage``.

    If ``torch.compile`` or accelerate has wrapped ``model``, the model inside is compressed. In a world of one rank,
    where trainers wrap no model, any module is accepted: nothing is sent, and the `Wire` that is returned has a plan,
    statistics of zero bytes, and checkpoints that worlds of any size can load.

    Raises:
        TypeError: ``model`` is none of these, or an argument belongs to another function, which the message names.
    """
    model = uncompiled(model)
    with fail_before_meeting(_first_group(model)):
        function = _function_for(model)
        if compressor is not None:
            named = "gradients" if function is compress_fsdp else "compressor"
            if named in options:
                raise TypeError(f"{named} is given twice: {compressor!r} and {options[named]!r}")
            options[named] = compressor
        for name in options:
            if name not in inspect.signature(function).parameters:
                raise TypeError(explained(name, options[name], function, type(model).__name__))
        return function(model, **options)


def compress_ddp(
    model: DistributedDataParallel,
    compressor: Rules | Auto | None = None,
    *,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    adapt: str | Policy | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    skip_if_slower: bool = True,
    network: Network = Network(),
    checks: Checks = Checks(),
    simulate: bool = False,
) -> Wire:
    """Compress the gradients that a ``DistributedDataParallel`` model sends.

    Args:
        model: the wrapped model. Its parameters are on the CPU, with gloo, or on one CUDA device of each rank, with
            NCCL, where Triton compresses (docs/gpu.md describes the differences).
        compressor: a compressor, its spec such as ``"minmax(bits=4)"``, or a mapping from name patterns to either. A
            layer is a parameter, by its name in the module inside DDP. A pattern that is a layer's full name holds for
            that layer alone and precedes all others; then the first pattern that matches holds. A pattern with ``*`` or
            ``?`` must match the whole name; any other matches every name that contains it. Layers that no pattern
            matches, or that their compressor cannot take (``wire.unsuited`` says why), stay raw: they are sent
            uncompressed. Compressors that drop or distort much (``topk``, ``powersgd``, ...) get error feedback unless
            they say ``feedback=False``. The default is ``minmax(bits=4, bucket=128)``, for which ``4bit`` is short, as
            ``8bit``, ``2bit`` and ``bf16`` are for others. ``auto``, or `thinwire.policies.Auto`, measures the links
            while the model trains and chooses what pays for each layer, or nothing if nothing does (docs/auto.md).
        exclude: patterns of layers that stay raw. Layers with fewer than two dimensions (biases, norms) or fewer than
            ``min_numel`` elements stay raw in any case, unless ``compressor`` has their full name as a pattern, or it
            takes every layer (``intsgd``, so that no float is sent).
        min_numel: the number of elements below which a layer stays raw.
        start: the number of steps at the beginning in which nothing is compressed. Markov's thesis of 2024 (section
            4.6.1) turns compression on after the learning rate's warm-up.
        seed: the seed of stochastic rounding. Its random draws depend only on this seed, the step, the rank, the layer
            and the element; no global generator is touched.
        adapt: a policy, or its spec, that chooses each layer's compression again from time to time as the model trains.
            ``lgreco(every=500, warmup=100)`` sends the least at the error that ``compressor`` would have
            (docs/auto.md); ``warmup`` has the meaning of ``start``. ``wire.decisions`` lists the policy's decisions.
        optimizer: the optimizer of the model, for compressors that follow its learning rate
            (``fft(theta=diminishing)``) or its steps (``intsgd(scale=params)``), and for the policy ``accordion``. With
            `thinwire.optim.CompressedAdamW` updates are sent in place of gradients, with `thinwire.optim.QuantizedAdam`
            momenta once its warm-up is over, both with error feedback around every compressor.
        grad_scaler: the ``GradScaler`` of fp16 training, so that error feedback keeps residuals in unscaled units.
        skip_if_slower: whether this call measures how fast this machine compresses and how fast the link is, and leaves
            raw what would not be faster compressed (``wire.declined``). False compresses in any case.
        network: a `thinwire.Network`, for the collective algorithm, transport, aggregator, timeout and streams.
        checks: a `thinwire.Checks`, for what is checked while the model trains, and how often.
        simulate: whether to compress and decompress gradients in place but send them uncompressed, to study accuracy on
            any backend and device. ``wire.stats`` counts the bytes that would have been sent.

    Returns:
        The `Wire`, which has ``stats``, ``plan``, ``gather_state_dict()`` for checkpoints, and ``detach()``.

    Raises:
        TypeError: an argument is of the wrong type, or a layer's dtype cannot be compressed.
        ValueError: a pattern matches no parameter, a spec or a policy is invalid, or the policy cannot choose among
            such compressors.
        RuntimeError: the model is compressed already or has another communication hook, or it is on a GPU, and NCCL or
            Triton is missing.
        NotImplementedError: the parameters are on several devices, or on an accelerator other than CUDA.
        DisagreementError: the ranks gave different arguments; the message names the first that differs.
        SharedMemoryError: ``Network(transport="shared")`` was given, and ranks cannot share memory.
    """
    given = dict(locals())
    with fail_before_meeting(_first_group(given.pop("model"))), on_the_host():
        options = Options(**given)
        if isinstance(model, DistributedDataParallel):
            return attach_ddp(model, options)
        if isinstance(model, nn.Module) and is_alone():
            return attach_alone(model, options)
        raise TypeError(_unwrapped("compress_ddp", model))


def compress_fsdp(
    model: nn.Module,
    gradients: Rules | Auto | None = None,
    *,
    weights: Rules | None = None,
    across: Rules | None = None,
    master: bool = True,
    overlap: bool = True,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    adapt: str | Policy | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    skip_if_slower: bool = True,
    network: Network = Network(),
) -> Wire:
    """Compress the weights and gradients that a model under FSDP2 sends: QSDP (Markov's thesis of 2024, chapter 5).

    Args:
        model: a model, on the CPU or on CUDA, on which ``torch.distributed.fsdp.fully_shard`` was called.
        gradients: a compressor, its spec, or a mapping from name patterns to them, as in `compress_ddp`, for gradients
            when they are reduced. The default is ``minmax(bits=8, bucket=1024)``; ``raw`` leaves them uncompressed.
            ``ef(...)`` adds error feedback: every rank keeps a residual of the whole model (``wire.memory`` bytes).
        weights: the same for weights when they are gathered, with the same default. Every rank computes with the
            weights that arrive, its own shard included, and a step's forward and backward pass use the same ones.
            ``delta(...)`` sends the difference from the weights that have arrived before, of which every rank keeps a
            copy (``wire.memory`` bytes); it is for modules with ``reshard_after_forward=False``.
        across: the same for means of gradients over replicas, on a mesh (replicas, shards). The default is
            ``gradients``. Where every rank has the whole of each module, on a mesh (replicas, 1) or under
            ``replicate()``, only these means are sent, and ``gradients`` compresses them as `compress_ddp` does: with
            its default, ``minmax(bits=4, bucket=128)``, its ``auto`` and its collective algorithms.
        master: whether ranks keep their shards in full precision; False keeps only what was sent (thesis, eq. 5.2).
        overlap: whether, on the CPU, reductions go on while backward computes; gradients are complete when it ends.
            False waits for each reduction, for code that reads gradients within backward other than in
            ``register_post_accumulate_grad_hook`` or a module's backward hooks, which are taken into account.
        optimizer: the optimizer of the model. With `thinwire.optim.CompressedAdamW` updates are sent in place of
            gradients; with `thinwire.optim.QuantizedAdam` gradients are sent in full precision during its warm-up. Both
            add error feedback to ``gradients``.
        exclude, min_numel, start, seed, adapt, grad_scaler, skip_if_slower, network: see `compress_ddp`.

    Returns:
        The `Wire`, which has ``stats``, ``plan``, ``gather_state_dict()`` for checkpoints, and ``detach()``.

    Raises:
        The exceptions of `compress_ddp`.
    """
    given = dict(locals())
    with fail_before_meeting(_first_group(given.pop("model"))), on_the_host():
        from thinwire.integrations.fsdp import ShardedOptions, attach_fsdp

        options = ShardedOptions(**given)
        if not isinstance(model, nn.Module):
            raise TypeError(_unwrapped("compress_fsdp", model))
        return attach_fsdp(model, options)


def is_sharded(model: object) -> TypeGuard[nn.Module]:
    """Return whether ``fully_shard`` was called on the model, or on a module in it."""
    # Importing it takes a second, and where nobody has imported it no model is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)


def _first_group(model: object) -> object:
    """Return the process group that compressing ``model`` meets first, or None, for all ranks, if it meets none."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if is_sharded(model):
        from thinwire.integrations.fsdp import first_group

        return first_group(model)
    return None if isinstance(model, nn.Module) else getattr(model, "group", None)


def _function_for(model: object) -> Callable[..., Any]:
    if isinstance(model, DistributedDataParallel):
        return compress_ddp
    # Not imported here, for the reason in `is_sharded`.
    pipelining = sys.modules.get("torch.distributed.pipelining")
    if pipelining is not None and isinstance(model, pipelining.PipelineStage):
        return _stage_function()
    if is_sharded(model):
        return compress_fsdp
    if isinstance(model, nn.Module) and is_alone():
        return compress_ddp
    raise TypeError(_unwrapped("compress", model))


def _unwrapped(function: str, model: object) -> str:
    takes = "a DistributedDataParallel model" + (", or one under fully_shard()," if function == "compress" else ",")
    wrapped = "fully_shard" if function == "compress_fsdp" else "DistributedDataParallel"
    example = f"thinwire.{function}({wrapped}(model))"
    if isinstance(model, nn.DataParallel):
        unwrapped = f"thinwire.{function}({wrapped}(model.module))"
        return f"thinwire.{function}() takes {takes} not DataParallel: unwrap it first: model.module, then {unwrapped}"
    if isinstance(model, nn.Module):
        named = type(model).__name__
        if inside := _wrapped_inside(model):
            return f"thinwire.{function}() takes {takes} not {named}: {inside}"
        return f"thinwire.{function}() takes {takes} not {named}: wrap it first, {example}"
    return f"model must be a torch.nn.Module, not {type(model).__name__}: {example}"


def _wrapped_inside(model: nn.Module) -> str | None:
    """Return what to do with a model that is wrapped in another way, or deeper inside; None if it is not wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            names = all(name.isidentifier() for name in path.split("."))
            inner = f"model.{path}" if names else f"model.get_submodule({path!r})"
            return f"the DistributedDataParallel model is inside, pass that: thinwire.compress({inner})"
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            return "FSDP1 has no place for compression: use fully_shard() (FSDP2), then thinwire.compress(model)"
    if is_replicated(model):
        return "replicate() leaves nothing to attach to: thinwire.compress(DistributedDataParallel(model))"
    return None


def _stage_function() -> Callable[..., Any]:
    from thinwire.pipeline.stage import compress_stage

    return compress_stage


def explained(name: str, value: object, function: Callable[..., Any], kind: str) -> str:
    """Return why ``function``, for models of this ``kind``, takes no ``name``: which one does, and what it takes."""
    if name == "compressor" and function is _stage_function():
        call = f"thinwire.compress(stage, forward={value!r}, backward='maxabs(bits=8)')"
        return f"activations and their gradients between stages have a compressor each: {call}"
    functions = {"DistributedDataParallel": compress_ddp, "fully_shard()": compress_fsdp, "stages": _stage_function()}
    owners = [
        f"thinwire.{other.__name__}() ({models})"
        for models, other in functions.items()
        if name in inspect.signature(other).parameters
    ]
    if (inside := _inside(name, value)) is not None:
        return f"{name} is given within another argument: {inside}"
    takes = [own for own in inspect.signature(function).parameters if own not in ("model", "stage")]
    whose = f"is an argument of {' and '.join(owners)}" if owners else "is not an argument of thinwire.compress()"
    close = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else close_names(name, takes)
    if not owners and close and close[0] in takes:
        whose += f" (did you mean {close[0]}=?)"
    takes = ", ".join(f"{own}=" for own in takes)
    return f"{name}= {whose}; for this {kind}, thinwire.{function.__name__}() takes {takes}"


def _inside(name: str, value: object) -> str | None:
    """Return a call that takes ``name``, if it is a parameter of compressors, or a field of `Network` or `Checks`."""
    for group, argument in ((Network, "network"), (Checks, "checks")):
        if name in inspect.signature(group).parameters:
            return f"thinwire.compress(model, {argument}=thinwire.{group.__name__}({name}={value!r}))"
    spec = _SPECS.get(name)
    return spec and f'thinwire.compress(model, "{spec.format(value)}")'


_SPECS = {
    **dict.fromkeys(("ef", "error_feedback"), "ef(minmax(bits=4))"),
    "bits": "minmax(bits={!r})",
    "bucket": "minmax(bucket={!r})",
    "density": "topk(density={!r})",
    "rank": "powersgd(rank={!r})",
}
"""Specs, by the argument that users give in their place."""
_OTHER_NAMES = {
    **dict.fromkeys(("spec", "method", "rules", "compression", "policy"), "compressor"),
    **dict.fromkeys(("warmup", "warmup_steps", "start_step", "start_iter"), "start"),
    **dict.fromkeys(("ignore", "skip"), "exclude"),
    **dict.fromkeys(("scaler",), "grad_scaler"),
}
"""Names of arguments, by the names that other libraries or users give them."""
