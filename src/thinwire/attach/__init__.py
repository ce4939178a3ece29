"""What a Wire can be attached to, one file per thing that PyTorch lets us attach to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach.ddp import Options, compress_ddp
from thinwire.attach.group_options import ProcessGroupOptions
from thinwire.attach.pipeline_stats import PipelineStats
from thinwire.attach.process_group import ProcessGroup, register_backend, register_model
from thinwire.collectives import Topology, TransportChoice, parse_topology
from thinwire.plan import DEFAULT_RULES, Policy, Rules, parse_policy
from thinwire.wire import Wire

__all__ = ["PipelineStats", "ProcessGroup", "ProcessGroupOptions", "compress", "register_model"]

register_backend()


def compress(
    model: nn.Module,
    rules: Rules = DEFAULT_RULES,
    *,
    exclude: Sequence[str] = (),
    min_numel: int = 1024,
    start: int = 0,
    seed: int = 0,
    decline: bool = True,
    simulate: bool = False,
    parity: int = 1000,
    resync: int = 0,
    measure: int = 0,
    topology: str | Topology = "sra",
    transport: TransportChoice = "auto",
    aggregator: str | None = None,
    adapt: str | Policy | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
) -> Wire:
    """Compress what ``model`` sends while it trains. Call it once, on every rank, after wrapping the model.

        model = DistributedDataParallel(model)
        wire = thinwire.compress(model)
        wire = thinwire.compress(model, {"embed.*": "minmax(bits=2)", "*": "minmax(bits=4)"}, exclude=["bn", "bias"])

    Args:
        model: a ``DistributedDataParallel`` model with its parameters on the CPU, over gloo; or on one CUDA device of
            each rank, over NCCL, where Triton compresses (docs/gpu.md says what differs there).
        rules: a compressor, its spec, or a mapping from name patterns to them: the first pattern that matches holds. A
            pattern with ``*`` or ``?`` must match the whole name of the parameter in the module inside DDP; a plain
            word matches any name that contains it. Layers that no pattern matches stay raw. Compressors that drop or
            distort much (``topk``, ``powersgd`` ...) get error feedback around them unless they say
            ``feedback=False``; layers that a compressor cannot take stay raw (``wire.unsuited`` says which and why).
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
            Its ``warmup`` is a ``start``. ``wire.decisions`` says what it did.
        optimizer: the optimizer, for compressors that follow its learning rate (``fft(theta=diminishing)``) or its
            steps (``intsgd(scale=params)``), and for ``accordion``.
        grad_scaler: the ``GradScaler`` of an fp16 training; error feedback keeps its residuals in unscaled units.
        timeout: of the process group that the Wire makes for itself; that of the model's own if None. Gradients on a
            GPU travel over the model's own.

    Returns:
        The Wire: ``stats``, ``plan``, ``state_dict()``, ``detach()``.

    Raises:
        TypeError: the model is not a ``DistributedDataParallel``, or a layer's dtype cannot be compressed.
        ValueError: a pattern matches no parameter, a spec or a policy is wrong, or the policy cannot choose among
            compressors like the rules'.
        RuntimeError: the model is compressed already, or has another communication hook; or it is on a GPU, and NCCL
            or Triton is missing.
        NotImplementedError: its parameters are on several devices, or on an accelerator that is not CUDA's.
        DisagreementError: the ranks gave different arguments.
        SharedMemoryError: ``transport="shared"``, and ranks cannot share memory.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"thinwire.compress() takes a DistributedDataParallel model, not {type(model).__name__}: "
            "wrap it first, model = DistributedDataParallel(model)"
        )
    policy = None if adapt is None else parse_policy(adapt)
    options = Options(
        exclude=exclude,
        min_numel=min_numel,
        start=max(start, policy.warmup if policy else 0),
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
    return compress_ddp(model, rules, options)
