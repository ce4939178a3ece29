"""Options of a process group of backend ``thinwire``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, NoReturn, get_args

import torch

from thinwire.arguments import check_choice, check_int
from thinwire.collectives import Algorithm, TransportChoice, parse_algorithm
from thinwire.compat import uses_torchcomms
from thinwire.compressors import Coded, Compressor, Raw, Summed, at_step, needs_state, parse
from thinwire.plan import DEFAULT_RULES
from thinwire.runtime import Kind


class GroupBuffer(NamedTuple):
    """The properties of a buffer that a process group could compress, which are the same on all ranks."""

    kind: Kind
    """``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``."""
    numel: int
    """Number of elements of the buffer, or of each rank's part of it."""
    dtype: torch.dtype
    op: Literal["sum", "avg", "premul_sum"] | None = None
    """Operation of the collective; None for all-gathers."""
    in_place: bool = False
    """Whether an all-gather finds this rank's part where it belongs in the output."""
    registered: bool = False
    """Whether registered layers fill the buffer."""

    @property
    def is_known(self) -> bool:
        """Whether the buffer is assumed to hold gradients or weights, as registered layers, averages (``AVG`` and
        ``PREMUL_SUM``) and all-gathers in place, by which FSDP2 sends weights, are."""
        return self.registered or self.op in ("avg", "premul_sum") or self.in_place


def _is_known(buffer: GroupBuffer) -> bool:
    return buffer.is_known


@dataclass(frozen=True)
class ProcessGroupOptions:
    """Options by which a process group of backend ``thinwire`` compresses buffers.

        dist.init_process_group("cpu:thinwire", pg_options=thinwire.ProcessGroupOptions("minmax(bits=8)"))
        dist.new_group(backend="thinwire", pg_options=thinwire.ProcessGroupOptions(all_gather="raw"))
        init_device_mesh(..., backend_override={"rep": ("thinwire", thinwire.ProcessGroupOptions())})

    A group without options has those of the default group, if that is of this backend, or else the defaults below.
    Options must be the same on all ranks of the group.

    Args:
        compressor: the compressor of all-reduces. It must not keep state, since a group does not know which
            parameters a buffer holds.
        all_gather: the compressor of all-gathers, by which FSDP2 sends weights. None is ``compressor``, or raw if that
            one is summed (``cast``, ``randk``), since nothing is summed there.
        reduce_scatter: the compressor of reduce-scatters. None is ``compressor``, or raw if that one is summed.
        min_numel: the number of elements below which a buffer (such as a loss that is averaged), or each rank's part
            of it, is sent raw. A registered layer of fewer is sent raw, too.
        exclude: patterns of registered layers that are sent raw, in addition to those with fewer than two dimensions.
        algorithm: the collective algorithm of all-reduces, as `thinwire.compress` takes it.
        transport: the transport between ranks of one node, as `thinwire.compress` takes it.
        seed: the seed of the random draws of stochastic rounding.
        timeout: the timeout of every message. The default is that of ``init_process_group`` or ``new_group``.
        where: a function that returns whether a `GroupBuffer` is compressed, by its ``kind``, ``op``, ``numel``,
            ``dtype``, ``registered``, ``in_place`` and ``is_known``; it must return the same on all ranks. The default
            compresses those known to hold gradients or weights, ``lambda buffer: buffer.is_known``.

    Raises:
        ValueError: a spec or a value is invalid, or a compressor needs state.
        TypeError: an argument is of the wrong type.
        RuntimeError: PyTorch makes its process groups with torchcomms.
    """

    compressor: str | Compressor = DEFAULT_RULES
    all_gather: str | Compressor | None = None
    reduce_scatter: str | Compressor | None = None
    min_numel: int = 1024
    exclude: Sequence[str] = ()
    algorithm: str | Algorithm = "sra"
    transport: TransportChoice = "auto"
    seed: int = 0
    timeout: timedelta | None = None
    where: Callable[[GroupBuffer], bool] = _is_known

    def __post_init__(self) -> None:
        if uses_torchcomms("thinwire"):
            refuse_torchcomms()
        check_int("min_numel", self.min_numel, 0)
        check_int("seed", self.seed, 0)
        check_choice("transport", self.transport, get_args(TransportChoice))
        if not callable(self.where):
            raise TypeError(f"where takes a function of a GroupBuffer, not {self.where!r}")
        if isinstance(self.exclude, str):
            raise TypeError(f"exclude must be a list of patterns, not {self.exclude!r}: exclude=[{self.exclude!r}]")
        self._set("exclude", tuple(self.exclude))
        self._set("algorithm", parse_algorithm(self.algorithm))
        self._set("compressor", stateless("compressor", self.compressor))
        for name in ("all_gather", "reduce_scatter"):
            asked = getattr(self, name)
            if asked is None:
                asked = Raw() if isinstance(self.compressor, Summed) else self.compressor
            chosen = stateless(name, asked)
            if not isinstance(chosen, Coded):
                raise ValueError(f"{name}={chosen} is meant to be summed by an all-reduce: give a quantizer, or raw")
            self._set(name, chosen)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def _timeout(self) -> timedelta | None:
        """The timeout, in the attribute that `DeviceMesh` reads."""
        return self.timeout

    def get_compressor(self, kind: Kind) -> Compressor:
        """Return the compressor of one kind of collective."""
        return parse(self.compressor if kind == "all_reduce" else getattr(self, kind))

    def record(self) -> dict[str, str]:
        """Return the options that all ranks must have in common."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # The text of a function has its address, which differs between ranks.
        named["where"] = getattr(self.where, "__qualname__", type(self.where).__name__)
        return {name: str(value) for name, value in named.items()}


def refuse_torchcomms() -> NoReturn:
    """Raise ``RuntimeError``, because PyTorch asks torchcomms for all process groups and never calls this backend."""
    raise RuntimeError(
        "PyTorch makes its process groups of torchcomms here (TORCH_DISTRIBUTED_USE_TORCHCOMMS, or "
        "torch.distributed.config.use_torchcomms), and torchcomms has no backend thinwire: unset it"
    )


def stateless(where: str, spec: str | Compressor) -> Compressor:
    """Return the compressor of a spec, if it needs nothing but the buffer.

    Raises:
        ValueError: the compressor needs more, or the spec is invalid.
    """
    compressor = parse(spec)
    instead = "use thinwire.compress(model), which keeps state for each parameter"
    if compressor.traits.wants_feedback:
        raise ValueError(
            f"{where}={compressor} needs error feedback, and a process group sees buffers, not parameters: {instead}; "
            "or give up error feedback with feedback=False"
        )
    if needs_state(compressor):
        raise ValueError(
            f"{where}={compressor} keeps state, and a process group sees buffers, not parameters: {instead}"
        )
    if at_step(compressor, 0, 1.0) is not compressor:
        raise ValueError(f"{where}={compressor} follows a schedule, and a process group counts no steps: {instead}")
    return compressor
