"""`thinwire.compress`: one call for DistributedDataParallel models, sharded models and pipeline stages."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach.ddp import Options, compress_ddp
from thinwire.attach.fsdp import DEFAULT_SHARDED_RULES, ShardedOptions, compress_fsdp
from thinwire.collectives import Topology, TransportChoice, parse_topology
from thinwire.optim import QuantizedAdam
from thinwire.plan import DEFAULT_RULES, Auto, ByLink, Policy, Rules, Site, parse_policy
from thinwire.wire import ShardedWire, Wire

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from thinwire.attach.pipeline.options import Specs
    from thinwire.attach.pipeline.stage import Compressing
    from thinwire.store import Place

_PARITY = 1000


@overload
def compress(
    model: DistributedDataParallel,
    rules: Rules | Auto | None = None,
    *,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    decline: bool = True,
    topology: str | Topology = "sra",
    transport: TransportChoice = "auto",
    adapt: str | Policy | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    simulate: bool = False,
    parity: int = _PARITY,
    resync: int = 0,
    measure: int = 0,
    aggregator: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Wire: ...


@overload
def compress(
    model: nn.Module,
    *,
    weights: Rules | None = None,
    gradients: Rules | None = None,
    master: bool = True,
    replicas: dist.ProcessGroup | None = None,
    across: Rules | None = None,
    overlap: bool = True,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    decline: bool = True,
    topology: str | Topology = "sra",
    transport: TransportChoice = "auto",
    adapt: str | Policy | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
) -> ShardedWire: ...


@overload
def compress(
    model: PipelineStage,
    *,
    forward: Specs = ...,
    backward: Specs = ...,
    store: Place | None = None,
    precision: int = 32,
    seed: int = 0,
    warmup_epochs: int = 0,
    check_every: int = 100,
    evaluation: Any = "raw",
    max_length: int | None = None,
    adapt: ByLink | None = None,
) -> Compressing: ...


def compress(
    model: Any,
    rules: Rules | Auto | None = None,
    *,
    weights: Rules | None = None,
    gradients: Rules | None = None,
    master: bool = True,
    replicas: dist.ProcessGroup | None = None,
    across: Rules | None = None,
    overlap: bool = True,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    decline: bool = True,
    topology: str | Topology = "sra",
    transport: TransportChoice = "auto",
    adapt: str | Policy | ByLink | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    simulate: bool = False,
    parity: int = _PARITY,
    resync: int = 0,
    measure: int = 0,
    aggregator: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **of_a_stage: Any,
) -> Wire | ShardedWire | Compressing:
    """Compress what ``model`` sends while it trains. Call it once, on every rank, after wrapping the model.

        model = DistributedDataParallel(model)
        wire = thinwire.compress(model)
        wire = thinwire.compress(model, {"embed.*": "minmax(bits=2)", "*": "minmax(bits=4)"}, exclude=["bn", "bias"])

        fully_shard(model)  # FSDP2, its blocks first: weights and gradients (docs/fsdp.md)
        wire = thinwire.compress(model, weights="minmax(bits=8, bucket=1024)", gradients="minmax(bits=4, bucket=1024)")

        stage = PipelineStage(...)  # of PyTorch: activations and their gradients (docs/pipelines.md)
        stage = thinwire.compress(stage, forward="delta(maxabs(bits=4))", backward="maxabs(bits=8)")

    Args:
        model: a ``DistributedDataParallel`` model with its parameters on the CPU, over gloo; or on one CUDA device of
            each rank, over NCCL, where Triton compresses (docs/gpu.md says what differs there). Or a model, there
            or there, on which ``torch.distributed.fsdp.fully_shard`` was called: QSDP (thesis, chapter 5).
        rules: for ``DistributedDataParallel``. A compressor, its spec, or a mapping from name patterns to them: the
            first pattern that matches holds. A pattern with ``*`` or ``?`` must match the whole name of the parameter
            in the module inside DDP; a plain word matches any name that contains it. Layers that no pattern matches
            stay raw. Compressors that drop or distort much (``topk``, ``powersgd`` ...) get error feedback around them
            unless they say ``feedback=False``; layers that a compressor cannot take stay raw (``wire.unsuited`` says
            which and why). By default ``minmax(bits=4, bucket=128)``. ``auto``, or `thinwire.Auto`, chooses by layer
            what pays on the links as they are measured while training, and nothing if nothing does (docs/auto.md).
        weights: for ``fully_shard``: the same for weights, as they are gathered. Every rank computes with what arrived,
            its own shard included, and with the same weights in the forward and backward pass of a step. By default
            ``minmax(bits=8, bucket=1024)``, as for gradients; ``raw`` for none.
        gradients: for ``fully_shard``: the same for gradients, as they are reduced. ``ef(...)`` keeps what was not
            sent: of the whole model, on every rank (``wire.memory`` says how much).
        master: for ``fully_shard``. False: of its own shard a rank keeps only what it has sent of it (equation 5.2).
        replicas: for ``fully_shard`` on the shards' own mesh dimension alone: the process group of the other one. Means
            over replicas are then taken here, compressed as ``across`` says.
        across: see ``replicas``; ``raw`` by default.
        overlap: for ``fully_shard`` on the CPU. Reductions go on while backward computes, and gradients are complete
            when it ends. False waits for each, for code that reads gradients within backward by other means than
            ``register_post_accumulate_grad_hook`` or a module's backward hooks, which are seen.
        exclude: patterns of layers that stay raw. Layers with fewer than two dimensions (biases, norms) or fewer than
            ``min_numel`` elements do in any case, unless a rule gives their full name, or the compressor takes every
            layer (``intsgd``, so that no float is sent).
        min_numel: elements below which a layer stays raw.
        start: steps at the beginning that stay uncompressed; the thesis (section 4.6.1) turns compression on after the
            learning rate's warm-up.
        seed: of the random draws of stochastic rounding. They depend on it, on the step, the rank, the layer and the
            element only: no global generator is touched.
        decline: measure, here and now, how fast this machine compresses and how fast the link is, and leave raw what
            would not be faster compressed (``wire.declined``). False compresses in any case.
        simulate: compress and decompress in place, but let gradients travel uncompressed: to study accuracy on any
            backend and device. ``wire.stats`` counts the bytes that would have been sent.
        parity: compare a checksum of all ranks' parameters every so many steps, behind the training loop's back; a
            difference raises `ParityError` and names the first parameter. 0 never does.
        resync: copy rank 0's parameters to all ranks every so many steps (S3 does every 10), for hardware that does not
            compute alike. 0 never does.
        measure: every so many steps, also take the exact mean (an all-reduce in fp32, whose bytes count) and note how
            far what arrived is from it, in ``wire.stats.alpha``. 0 never does.
        topology: how messages meet. ``sra`` (scatter-reduce-all-gather) is the default; ``sra(rates=measured)`` gives
            ranks with faster links more to own; ``ring``, ``tree``, ``allgather``, ``parameter_server(server=0)``;
            ``hierarchical(inside=dense, across=slices)`` adds up inside each node first.
        transport: ``auto`` lets coded messages between ranks of one node lie in memory that these share (Linux), and
            sends the others over the process group; ``shared`` insists on it; ``group`` sends all of them. Ranks find
            out themselves who shares a node; the environment variable ``THINWIRE_NODE`` names a rank's node otherwise.
        aggregator: ``host:port`` of a ``thinwire aggregator`` that adds up integers in the network, for ``intsgd`` and
            ``heuristic_intsgd``. Floats never go there: sums of raw layers, and the exact first step of ``intsgd``,
            are native all-reduces as ever. ``host:port?slots=16`` asks for a part of its slots.
        adapt: a policy that chooses each layer's compression anew from time to time while the model trains:
            ``lgreco(every=500, warmup=100)`` sends the least at the error that the rules would have (docs/adaptive.md).
            Its ``warmup`` is a ``start``. ``wire.decisions`` says what it did. For a stage of a pipeline:
            `thinwire.ByLink`.
        optimizer: the optimizer, for compressors that follow its learning rate (``fft(theta=diminishing)``) or its
            steps (``intsgd(scale=params)``), and for ``accordion``. With `thinwire.optim.QuantizedAdam` its momentum is
            what travels once its warm-up is over, with error feedback around every compressor.
        grad_scaler: the ``GradScaler`` of an fp16 training; error feedback keeps its residuals in unscaled units.
        timeout: of the process group that the Wire makes for itself; that of the model's own if None. Gradients on a
            GPU travel over the model's own.
        of_a_stage: for a stage of a pipeline, which takes these and ``seed`` alone: the options of
            `thinwire.PipelineStage`.

    Returns:
        The Wire: ``stats``, ``plan``, ``state_dict()``, ``detach()``. Of a sharded model a `ShardedWire`, which has the
        same. Of a pipeline's stage, that stage.

    Raises:
        TypeError: the model is neither, a layer's dtype cannot be compressed, or an argument is for the other kind.
        ValueError: a pattern matches no parameter, a spec or a policy is wrong, or the policy cannot choose among
            compressors like the rules'.
        RuntimeError: the model is compressed already, or has another communication hook; or it is on a GPU, and NCCL
            or Triton is missing.
        NotImplementedError: its parameters are on several devices, or on an accelerator that is not CUDA's; or on a
            GPU, and ``auto`` was asked for.
        DisagreementError: the ranks gave different arguments.
        SharedMemoryError: ``transport="shared"``, and ranks cannot share memory.
    """
    given = dict(locals())
    if _is_stage(model):
        from thinwire.attach.pipeline.stage import compress_stage

        _check_for_stage(given)
        return compress_stage(model, seed=seed, adapt=adapt, **of_a_stage)
    if isinstance(adapt, ByLink):
        raise TypeError("adapt=thinwire.ByLink(...) is for the stages of a pipeline; see docs/adaptive.md for models")
    if of_a_stage:
        raise TypeError(f"{next(iter(of_a_stage))}= is no option of thinwire.compress() for a {type(model).__name__}")
    policy = None if adapt is None else parse_policy(adapt)
    automatic = _automatic(rules)
    if automatic is not None or isinstance(policy, Auto):
        _check_auto(model, automatic, adapt, simulate=simulate, optimizer=optimizer)
        # What pays is the policy's to decide, again and again.
        policy, decline = automatic, False
    named: Rules | None = None if automatic is not None or isinstance(rules, Auto) else rules
    start = max(start, policy.warmup if policy else 0)
    if not isinstance(model, DistributedDataParallel):
        _check_for_sharded(
            model,
            rules=(named, None),
            simulate=(simulate, False),
            parity=(parity or _PARITY, _PARITY),
            resync=(resync, 0),
            measure=(measure, 0),
            aggregator=(aggregator, None),
            optimizer=(optimizer, None),
        )
        asked: dict[Site, Rules] = {
            "weights": DEFAULT_SHARDED_RULES if weights is None else weights,
            "gradients": DEFAULT_SHARDED_RULES if gradients is None else gradients,
            "across": "raw" if across is None else across,
        }
        if across is not None and replicas is None:
            raise ValueError("across= compresses sums over replicas: say with replicas= which process group takes them")
        sharded = ShardedOptions(
            exclude=exclude,
            min_numel=min_numel,
            start=start,
            seed=seed,
            decline=decline,
            master=master,
            topology=parse_topology(topology),
            transport=transport,
            adapt=policy,
            grad_scaler=grad_scaler,
            timeout=timeout,
            replicas=replicas,
            overlap=overlap,
        )
        return compress_fsdp(model, asked, sharded)
    given = {"weights": weights, "gradients": gradients, "replicas": replicas, "across": across}
    foreign = (
        [name for name, value in given.items() if value is not None]
        + ([] if master else ["master"])
        + ([] if overlap else ["overlap"])
    )
    if foreign:
        raise TypeError(f"{foreign[0]}= is for models under fully_shard(); DistributedDataParallel takes rules")
    options = Options(
        exclude=exclude,
        min_numel=min_numel,
        start=start,
        seed=seed,
        decline=decline,
        simulate=simulate,
        parity=parity,
        resync=resync,
        measure=measure,
        topology=parse_topology(topology),
        transport=transport,
        aggregator=aggregator,
        adapt=policy,
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        timeout=timeout,
    )
    return compress_ddp(model, DEFAULT_RULES if named is None else named, options)


def _automatic(rules: Rules | Auto | None) -> Auto | None:
    """The policy in the place of rules, if there is one."""
    if isinstance(rules, Auto):
        return rules
    if isinstance(rules, str) and rules.strip().lower().startswith("auto"):
        found = parse_policy(rules)
        assert isinstance(found, Auto)
        return found
    return None


def _check_auto(
    model: object, auto: Auto | None, adapt: object, *, simulate: bool, optimizer: torch.optim.Optimizer | None
) -> None:
    if auto is None:
        raise ValueError('auto takes the place of the rules: thinwire.compress(model, "auto"), without adapt=')
    if adapt is not None:
        raise ValueError(f"auto decides by itself, and adapt={adapt!r} would, too: give one of them")
    if simulate:
        raise ValueError("auto goes by measured links, and simulate=True sends nothing: give rules instead")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"auto is for DistributedDataParallel models, not {type(model).__name__}: give rules instead")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise NotImplementedError("auto times steps on the host, which knows no times of a GPU: give rules instead")
    if isinstance(optimizer, QuantizedAdam):
        raise ValueError("with QuantizedAdam momenta travel, all with error feedback: give rules instead of auto")


def _is_stage(model: object) -> bool:
    pipelining = sys.modules.get("torch.distributed.pipelining")
    return pipelining is not None and isinstance(model, pipelining.PipelineStage)


def _check_for_stage(given: Mapping[str, object]) -> None:
    """Raise if an argument was given that a pipeline's stage has not."""
    for name, parameter in inspect.signature(compress).parameters.items():
        if name not in ("model", "seed", "adapt", "of_a_stage") and given[name] != parameter.default:
            raise TypeError(f"{name}= is not for a stage, which takes forward=, backward=, store= and others")


def _check_for_sharded(model: Any, **given: tuple[object, object]) -> None:
    """Raise if a model is not sharded, or an argument was given that only DistributedDataParallel has (each with its
    default)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if fsdp is None or not any(isinstance(module, fsdp.FSDPModule) for module in modules):
        raise TypeError(
            f"thinwire.compress() takes a DistributedDataParallel model, or one under fully_shard(), not "
            f"{type(model).__name__}: wrap it first, model = DistributedDataParallel(model)"
        )
    for name, (value, default) in given.items():
        if value != default:
            hint = "say weights= and gradients=" if name == "rules" else "leave it out"
            raise TypeError(f"{name}= is for DistributedDataParallel, and this model is sharded: {hint}")
