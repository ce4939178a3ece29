"""Options of the compression at a pipeline's stage boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.arguments import check_int, check_type
from thinwire.compressors import Coded, Compressor, Delta, Raw, UnsuitedError, check_stateless, message_coder, parse
from thinwire.kernels import FORMAT_VERSION
from thinwire.pipeline.message import BoundaryTensors, Direction
from thinwire.plan.contraction import check_contraction
from thinwire.policies import ByLink
from thinwire.runtime.checkpoint import check_sealed, integers, sealed
from thinwire.store import Memory, Place, check_precision

Specs = str | Compressor | Sequence[str | Compressor]
"""A compressor for all boundaries, or one for each, the first stage's first."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `thinwire.compress_stage`."""

    forward: Specs = "delta(maxabs(bits=4))"
    backward: Specs = "maxabs(bits=8)"
    store: Place = field(default_factory=Memory)
    precision: int = 32
    seed: int = 0
    warmup_epochs: int = 0
    check_every: int = 100
    evaluation: str | Compressor = "raw"
    max_length: int | None = None
    adapt: ByLink | None = None
    evaluation_coder: Coded = field(init=False, repr=False)
    keeps: bool = field(init=False, repr=False)
    """Whether records are kept at any boundary."""
    _forward: tuple[Compressor, ...] = field(init=False, repr=False)
    _backward: tuple[Coded, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        forward = tuple(parse(spec) for spec in _listed(self.forward))
        backward = tuple(coded("backward", parse(spec)) for spec in _listed(self.backward))
        if self.adapt is not None:
            check_type("adapt", self.adapt, ByLink, "thinwire.policies.ByLink(...)")
            for compressor in self.choices("backward"):
                coded("backward", compressor)
        choices = () if self.adapt is None else self.choices("forward")
        for compressor in dict.fromkeys((*forward, *choices)):
            inner_coder(compressor)
        if choices and len({isinstance(compressor, Delta) for compressor in (*choices, *forward)}) > 1:
            raise ValueError(
                "messages are kept at all boundaries and for all choices or for none: give forward= and "
                "ByLink(forward=) delta(...) throughout, or nowhere"
            )
        object.__setattr__(self, "_forward", forward)
        object.__setattr__(self, "_backward", backward)
        object.__setattr__(self, "evaluation_coder", coded("evaluation", parse(self.evaluation)))
        object.__setattr__(self, "keeps", any(isinstance(compressor, Delta) for compressor in forward))
        check_type("store", self.store, Place, "a thinwire.store.Memory(...), Disk(path, ...) or Centers(...)")
        check_precision(self.precision)
        check_int("seed", self.seed, 0)
        check_int("warmup_epochs", self.warmup_epochs, 0)
        check_int("check_every", self.check_every, 1)
        self.store.check(precision=self.precision, warmup_epochs=self.warmup_epochs)
        if self.max_length is not None:
            check_int("max_length", self.max_length, 1)
        if self.warmup_epochs and not self.keeps:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} counts visits of samples, which {forward[0]} does not know: it "
                "goes with forward='delta(...)'"
            )

    def keeps_at(self, boundary: int) -> bool:
        """Whether records are kept at ``boundary``."""
        return isinstance(self._forward[boundary % len(self._forward)], Delta)

    def choices(self, direction: Direction) -> tuple[Compressor, ...]:
        """Return the compressors to choose from by link (``adapt``)."""
        assert self.adapt is not None
        return tuple(parse(spec) for spec in getattr(self.adapt, direction))

    def coder_at(self, boundary: int, direction: Direction, choice: int | None = None) -> Coded:
        """Return the compressor of activations, of their change, or of gradients at a boundary: one of `choices`, or by
        default the one that was given."""
        if choice is not None:
            compressor = self.choices(direction)[choice]
        else:
            given = self._forward if direction == "forward" else self._backward
            compressor = given[boundary % len(given)]
        return coded(direction, message_coder(compressor))

    def check(self, num_stages: int) -> None:
        """Raise ``ValueError`` unless there is one compressor, or one for each boundary of ``num_stages`` stages."""
        for name, compressors in (("forward", self._forward), ("backward", self._backward)):
            if len(compressors) not in (1, max(1, num_stages - 1)):
                raise ValueError(
                    f"{name} has {len(compressors)} compressors for {num_stages - 1} boundaries: give one, or as many"
                )

    def record(self, num_stages: int) -> dict[str, str]:
        """Return the options that all ranks must have in common."""
        plain = ("precision", "seed", "warmup_epochs", "check_every", "max_length", "adapt")
        return {
            "wire format": str(FORMAT_VERSION),
            "num_stages": str(num_stages),
            "forward": "; ".join(map(str, self._forward)),
            "backward": "; ".join(map(str, self._backward)),
            "evaluation": str(self.evaluation_coder),
            **{name: str(getattr(self, name)) for name in plain},
            **{f"store {name}": str(value) for name, value in self.store.facts().items()},
        }


def _listed(specs: Specs) -> Sequence[str | Compressor]:
    if isinstance(specs, str | Compressor):
        return [specs]
    if not specs:
        raise ValueError("no compressor is given: name one, or one for each boundary")
    return specs


def coded(name: str, compressor: Compressor) -> Coded:
    """Return ``compressor``, if activations or gradients can be sent in it.

    Raises:
        ValueError: they cannot; ``name`` is that of the option.
    """
    if isinstance(compressor, Delta):
        raise ValueError(
            f"{name}={compressor}: only activations on their way forward are compared with their last visit; give "
            f"{compressor.inner}"
        )
    check_stateless(compressor)
    assert isinstance(compressor, Coded)
    return compressor


def inner_coder(compressor: Compressor) -> Coded:
    """Return the compressor of activations, or of the changes of which ``delta(...)`` is made. A warning says where
    training may not converge with these changes.

    Raises:
        ValueError: they cannot be sent in it.
    """
    inner = coded("forward", message_coder(compressor))
    if inner is not compressor:
        check_contraction(inner)
    return inner


@lru_cache
def fitted(coder: Coded, crossing: BoundaryTensors) -> tuple[Coded, ...]:
    """Return the compressor of each activation that crosses, for samples of that shape.

    Raises:
        ValueError: it cannot take such samples.
    """
    return tuple(_fitted(coder, crossing.specs[i].shape[1:]) for i in crossing.floats)


def _fitted(coder: Coded, shape: Sequence[int]) -> Coded:
    if isinstance(coder, Raw):
        return coder
    try:
        fitted = coder.fit(shape or (1,))
    except UnsuitedError as why:
        raise ValueError(f"{coder} cannot code activations of shape {tuple(shape)} a sample: {why}") from None
    if isinstance(fitted, Raw):
        raise ValueError(f"{coder} cannot code activations of shape {tuple(shape)} a sample: they would be sent raw")
    return coded("the compressor", fitted)


def write_state(seed: int, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a state with checksums of its entries, which are ``part/name``, or just the name for the part ``""``."""
    state = {
        "seed": torch.tensor(seed, dtype=torch.int64, device="cpu"),
        "format_version": torch.tensor(FORMAT_VERSION, dtype=torch.int64, device="cpu"),
    }
    for part, entries in parts.items():
        state |= {f"{part}/{name}" if part else name: value for name, value in entries.items()}
    return sealed(state)


def read_state(state: Mapping[str, Tensor], seed: int, kind: str, *names: str) -> dict[str, dict[str, Tensor]]:
    """Return copies of the entries of a state, by part and name.

    Raises:
        ValueError: it lacks one of ``names``, is damaged, or is of another seed or wire format. The error names the
            ``kind`` of state.
    """
    missing = {"seed", "format_version", *names} - set(state)
    if missing:
        raise ValueError(f"this is not the state of a {kind}: {', '.join(sorted(missing))} missing")
    check_sealed(state, [key for key in state if key != "checksums"])
    for name, mine in (("seed", seed), ("format_version", FORMAT_VERSION)):
        (saved,) = integers(state, name)
        if saved != mine:
            raise ValueError(f"the state has {name} {saved}, not {mine}: resume with the same")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        part, _, name = key.rpartition("/")
        parts.setdefault(part, {})[name] = value.detach().cpu().clone()
    return parts
