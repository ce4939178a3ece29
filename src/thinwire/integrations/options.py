"""Options that all variants of `thinwire.compress` share, and their record, on which ranks must agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from thinwire.aggregator import AggregatorAddress, parse_address
from thinwire.arguments import check_choice, check_int, check_type
from thinwire.collectives import Algorithm, TransportChoice, parse_algorithm
from thinwire.compressors import GRADIENT_DTYPES, Compressor, parse
from thinwire.plan import Filter, named_parameters, parameter_names
from thinwire.policies import Auto, Policy, parse_policy
from thinwire.runtime import WireSettings
from thinwire.runtime.consistency import library_version


@dataclass(frozen=True)
class Network:
    """Options that say how compressed messages are sent.

        thinwire.compress(model, network=thinwire.Network(algorithm="hierarchical", transport="shared"))

    Args:
        algorithm: the collective algorithm. None, the default, is ``sra`` (scatter-reduce-all-gather) for
            `thinwire.compress`, and ``allgather`` for `thinwire.local.DiLoCo` of two workers. ``sra(rates=measured)``
            lets ranks with faster links reduce more, and ``hierarchical(inside=dense, across=slices)`` adds up inside
            nodes first; others are ``ring``, ``tree``, ``tree(root=0)`` and ``parameter_server(server=0)``.
        transport: ``auto`` puts messages between ranks of one node into memory that they share (Linux) and sends others
            over the process group; ``shared`` raises an exception where memory cannot be shared; ``group`` sends all
            messages over the process group. Ranks find out themselves which of them share a node, unless the
            environment variable ``THINWIRE_NODE`` names a rank's node.
        aggregator: ``host:port`` of a ``thinwire aggregator`` that adds up integers in the network, for ``intsgd`` and
            ``heuristic_intsgd`` under ``DistributedDataParallel``. Floats are never sent there: sums of raw layers, and
            the exact first step of ``intsgd``, are native all-reduces. ``host:port?slots=16`` asks for a part of its
            slots, and a `thinwire.AggregatorAddress` has the token and the TLS context that it may require.
        timeout: the timeout of the process group that the Wire makes for itself. None, the default, is that of the
            model's own, over which gradients on a GPU are sent.
        streams: the number of TCP connections to each other rank, 1 to 64, over which messages are sent in parts.
            Several carry more over a link that loses packets than one does; without losses they are no faster
            (docs/speed.md). Messages from a GPU, and native all-reduces, use one.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    algorithm: str | Algorithm | None = None
    transport: TransportChoice = "auto"
    aggregator: str | AggregatorAddress | None = None
    timeout: timedelta | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        check_type("algorithm", self.algorithm, str | Algorithm | None, "text", "Network(algorithm='ring')")
        if self.algorithm is not None:
            parse_algorithm(self.algorithm)
        check_choice("transport", self.transport, get_args(TransportChoice))
        kinds, hint = str | AggregatorAddress | None, "Network(aggregator='host:5000')"
        check_type("aggregator", self.aggregator, kinds, "text or an AggregatorAddress", hint)
        if isinstance(self.aggregator, str):
            parse_address(self.aggregator)
        hint = "Network(timeout=timedelta(seconds=60))"
        check_type("timeout", self.timeout, timedelta | None, "a datetime.timedelta", hint)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be above 0, not {self.timeout}: {hint}")
        check_int("streams", self.streams, 1, 64, "Network(streams=4)")

    def chosen_algorithm(self, default: str) -> Algorithm:
        """Return the collective algorithm, ``default`` if none was given."""
        return parse_algorithm(default if self.algorithm is None else self.algorithm)


@dataclass(frozen=True)
class Checks:
    """Numbers of steps between checks while a model trains; 0 leaves a check out.

    Args:
        parity_every: steps between comparisons of checksums of all ranks' parameters, which run while training goes on.
            A difference raises `ParityError`, which names the first parameter that differs.
        resync_every: steps between copies of rank 0's parameters to all ranks (10 in the FFT paper), for hardware that
            does not compute alike.
        measure_every: steps between measurements of the relative error of the mean that arrived, in
            ``wire.stats.alpha``. Each takes the exact mean by an all-reduce in fp32, whose bytes are counted.

    Raises:
        TypeError, ValueError: an argument is not an integer from 0 up; the message names it.
    """

    parity_every: int = 1000
    resync_every: int = 0
    measure_every: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_int(field.name, getattr(self, field.name), 0, hint=f"thinwire.Checks({field.name}=1000)")


@dataclass(frozen=True)
class CommonOptions:
    """The arguments that `thinwire.compress_ddp` and `thinwire.compress_fsdp` share."""

    exclude: Sequence[str] = ()
    min_numel: int = 1024
    start: int = 0
    seed: int = 0
    adapt: str | Policy | None = None
    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    skip_if_slower: bool = True
    network: Network = Network()
    as_device: bool = False
    """Whether tensors of the CPU are sent as those of a GPU are, for tests."""

    def __post_init__(self) -> None:
        hint = "network=thinwire.Network(algorithm='ring')"
        check_type("network", self.network, Network, "a thinwire.Network", hint)

    @property
    def algorithm(self) -> Algorithm:
        """The collective algorithm of the messages."""
        return self.network.chosen_algorithm("sra")

    def settings(self, policy: Policy | None) -> WireSettings:
        """Return the settings of the `Wire` that these arguments ask for, with the given ``policy``."""
        return WireSettings(
            seed=self.seed,
            start=max(self.start, policy.warmup if policy else 0),
            # `Auto` decides itself what pays, again and again.
            skip_if_slower=self.skip_if_slower and not isinstance(policy, Auto),
            algorithm=self.algorithm,
            adapt=policy,
        )

    def filter(self, module: nn.Module) -> Filter:
        """Return the filter of the layers of ``module`` that stay raw."""
        return Filter(min_numel=self.min_numel, exclude=tuple(self.exclude), names=parameter_names(module))


def unfit(module: nn.Module) -> dict[str, str]:
    """Return the layers whose gradients no compressor takes, and why: being sparse, or not floats of 16 or 32 bits."""
    parameters = named_parameters(module)
    why = {
        name: f"its dtype is {p.dtype}, and compressors take float32, bfloat16 and float16"
        for name, p in parameters.items()
        if p.dtype not in GRADIENT_DTYPES
    }
    names = {id(p): name for name, p in parameters.items()}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            kind = type(part).__name__
            # A weight that is computed (``torch.nn.utils.parametrize``) is no parameter, and has no name.
            if (name := names.get(id(part.weight))) is None:
                continue
            why[name] = f"its gradients are sparse ({kind}(sparse=True)), and are sent as they are"
    return why


def check_arguments(options: CommonOptions) -> None:
    """Check the arguments that all variants of `thinwire.compress` share.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and has an example of a correct call.
    """
    for name, most in (("min_numel", None), ("start", None), ("seed", 2**63 - 1)):
        check_int(name, getattr(options, name), 0, most, f"thinwire.compress(model, {name}=1000)")
    patterns = options.exclude
    if isinstance(patterns, str) or not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"exclude must be a list of patterns, not {patterns!r}: exclude=['bn', 'bias']")
    check_bool("skip_if_slower", options.skip_if_slower)
    check_type("adapt", options.adapt, str | Policy | None, "a policy or its spec", "adapt='lgreco(every=500)'")
    kind, hint = torch.optim.Optimizer | None, "thinwire.compress(model, optimizer=optimizer)"
    check_type("optimizer", options.optimizer, kind, "a torch.optim.Optimizer", hint)
    kind, hint = torch.amp.GradScaler | None, "thinwire.compress(model, grad_scaler=scaler)"
    check_type("grad_scaler", options.grad_scaler, kind, "a torch.amp.GradScaler", hint)


def check_bool(name: str, value: object) -> None:
    """Raise ``TypeError`` unless the argument ``name`` is True or False."""
    check_type(name, value, bool, "True or False", f"thinwire.compress(model, {name}=False)")


def check_compressor(name: str, given: object) -> None:
    """Check that an argument is a compressor, a spec or a mapping from patterns to them.

    Raises:
        TypeError, ValueError: it is none of them; the message begins with ``name``.
    """
    if isinstance(given, Mapping) and not given:
        raise ValueError(f"{name} is an empty mapping, so that nothing would be compressed: {name}={{'*': '4bit'}}")
    if isinstance(given, Mapping) and not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(
            f"{name} must map name patterns to compressors, and {list(given)} are not all text: "
            f"{name}={{'embed.*': 'minmax(bits=2)', '*': 'minmax(bits=4)'}}"
        )
    for spec in given.values() if isinstance(given, Mapping) else [given] * (given is not None):
        if not isinstance(spec, str | Compressor):
            right = f"{name}='minmax(bits=4)'"
            if isinstance(spec, type) and issubclass(spec, Compressor):
                right = f"{name}={spec.__name__}(), an instance of the class, or its spec, {right}"
            shown = type(spec).__name__ if "\n" in repr(spec) else repr(spec)
            raise TypeError(
                f"{name} must be a compressor, its spec, or a mapping from name patterns to them, not {shown}: {right}"
            )
        if isinstance(spec, str):
            try:
                parse(spec)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None


def make_policy(adapt: str | Policy | None) -> Policy | None:
    """Return the policy that ``adapt=`` names.

    Raises:
        ValueError: it names none; the message begins with ``adapt``.
    """
    try:
        return None if adapt is None else parse_policy(adapt)
    except ValueError as error:
        raise ValueError(f"adapt: {error}") from None


def describe_options(options: CommonOptions) -> dict[str, str]:
    """Return what all ranks must have in common: every option as text, by its name, and the versions of the libraries.

    Values that mean the same have the same text, such as a compressor and its spec, or a list and a tuple. For an
    optimizer and a `GradScaler` only the type is recorded, and for a process group its size.
    """
    record = {"thinwire": library_version(), "torch": torch.__version__}
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Network | Checks):
            record |= {f"{field.name}.{f.name}": _text(getattr(value, f.name), f.name) for f in fields(value)}
        else:
            record[field.name] = _text(value, field.name)
    return record | {"network.algorithm": str(options.algorithm)}


_PARSERS: dict[str, tuple[Callable[[str], object], ...]] = {
    **dict.fromkeys(("compressor", "weights", "gradients", "across"), (parse, parse_policy)),
    "adapt": (parse_policy,),
    "algorithm": (parse_algorithm,),
}


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return _canonical(value, _PARSERS.get(name, ()))
    if isinstance(value, Mapping):
        return "; ".join(f"{key} = {_text(item, name)}" for key, item in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(str, value))
    if isinstance(value, dist.ProcessGroup):
        return f"a process group of {value.size()} ranks"
    if isinstance(value, torch.optim.Optimizer | torch.amp.GradScaler):
        return type(value).__name__
    # Addresses in memory differ between ranks that were given the same.
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(value).split()))


def _canonical(text: str, parsers: Sequence[Callable[[str], object]]) -> str:
    """Return the full spec for a short one, or the text itself if it is no spec, so that all ranks refuse it alike."""
    for parser in parsers:
        try:
            return str(parser(text))
        except (ValueError, TypeError):
            continue
    return text
