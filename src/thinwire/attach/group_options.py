"""What a process group of backend ``thinwire`` is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from thinwire.collectives import Topology, TransportChoice, check_choice, parse_topology
from thinwire.compressors import Coded, Compressor, Raw, Summed, check_int, parse
from thinwire.plan import DEFAULT_RULES
from thinwire.wire import Kind


@dataclass(frozen=True)
class ProcessGroupOptions:
    """How a process group of backend ``thinwire`` compresses the buffers that it is handed.

        dist.init_process_group("cpu:thinwire", pg_options=thinwire.ProcessGroupOptions("minmax(bits=8)"))
        dist.new_group(backend="thinwire", pg_options=thinwire.ProcessGroupOptions(all_gather="raw"))
        init_device_mesh(..., backend_override={"rep": ("thinwire", thinwire.ProcessGroupOptions())})

    Without options a group takes those of the default group, if that is one of ours, else the defaults here. Options
    must be the same on all ranks of the group.

    Args:
        compressor: of all-reduces: one that keeps no state, since a buffer does not say which parameters are in it.
        all_gather: of all-gathers, which FSDP2 sends weights by. None: as ``compressor``; exact, if that one is summed
            (``cast``, ``randk``), since nothing is summed there.
        reduce_scatter: of reduce-scatters. None: as ``compressor``; exact, if that one is summed.
        min_numel: buffers of fewer elements (a loss that is averaged, say), and those of which each rank has a part of
            fewer, travel exact, by gloo; registered layers of fewer travel raw.
        exclude: patterns of registered layers that travel raw, besides those with fewer than two dimensions.
        layout: names and shapes of the layers, end to end, of every buffer of exactly as many elements; as
            `ProcessGroup.register_layout` takes them.
        topology: how the messages of an all-reduce meet, as `thinwire.compress` takes it.
        transport: between ranks of one node, as `thinwire.compress` takes it.
        seed: of the random draws of stochastic rounding.
        timeout: of every message; by default the one that ``init_process_group`` or ``new_group`` was given.

    Raises:
        ValueError: a spec or a value is wrong, or a compressor needs state.
        TypeError: an argument is of the wrong kind.
    """

    compressor: str | Compressor = DEFAULT_RULES
    all_gather: str | Compressor | None = None
    reduce_scatter: str | Compressor | None = None
    min_numel: int = 1024
    exclude: Sequence[str] = ()
    layout: Sequence[tuple[str, Sequence[int]]] = ()
    topology: str | Topology = "sra"
    transport: TransportChoice = "auto"
    seed: int = 0
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        check_int("min_numel", self.min_numel, 0)
        check_int("seed", self.seed, 0)
        check_choice(self.transport)
        if isinstance(self.exclude, str):
            raise TypeError(f"exclude takes a list of patterns: exclude=[{self.exclude!r}]")
        self._set("exclude", tuple(self.exclude))
        self._set("layout", tuple((name, tuple(shape)) for name, shape in self.layout))
        self._set("topology", parse_topology(self.topology))
        self._set("compressor", stateless("compressor", self.compressor))
        for name in ("all_gather", "reduce_scatter"):
            asked = getattr(self, name)
            if asked is None:
                asked = Raw() if isinstance(self.compressor, Summed) else self.compressor
            chosen = stateless(name, asked)
            if not isinstance(chosen, Coded):
                raise ValueError(f"{name}={chosen} is meant to be summed by an all-reduce: give a quantiser, or raw")
            self._set(name, chosen)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def _timeout(self) -> timedelta | None:
        """Where a `DeviceMesh` looks for it."""
        return self.timeout

    def compressor_of(self, kind: Kind) -> Compressor:
        """The compressor of one kind of collective."""
        return parse(self.compressor if kind == "all_reduce" else getattr(self, kind))

    def record(self) -> dict[str, str]:
        """What all ranks must have in common."""
        return {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self)}


def stateless(where: str, spec: str | Compressor) -> Compressor:
    """The compressor of a spec, if it needs nothing but the buffer.

    Raises:
        ValueError: it does not, or the spec is wrong.
    """
    compressor = parse(spec)
    instead = "use thinwire.compress(model), which keeps state for each parameter"
    if compressor.wants_feedback:
        raise ValueError(
            f"{where}={compressor} needs error feedback, and a process group sees buffers, not parameters: {instead}; "
            "or give up error feedback with feedback=False"
        )
    if compressor.slots or (isinstance(compressor, Coded) and compressor.settles):
        raise ValueError(
            f"{where}={compressor} keeps state, and a process group sees buffers, not parameters: {instead}"
        )
    if compressor.at(0, 1.0) is not compressor:
        raise ValueError(f"{where}={compressor} follows a schedule, and a process group counts no steps: {instead}")
    return compressor
