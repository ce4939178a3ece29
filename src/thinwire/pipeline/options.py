"""Options of the compression at a pipeline's stage boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.arguments import check_int, check_type
from thinwire.compressors import Coded, Compressor, Delta, Raw, Unsuited, check_stateless, coder_of, parse
from thinwire.kernels import FORMAT_VERSION
from thinwire.pipeline.message import BoundaryTensors, Direction
from thinwire.plan.contraction import check_contraction
from thinwire.policies import ByLink
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
    _forward: tuple[Compressor, ...] = field(init=False, repr=False)
    _backward: tuple[Coded, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        forward = tuple(parse(spec) for spec in _listed(self.forward))
        for compressor in dict.fromkeys(forward):
            inner = coded("forward", coder_of(compressor))
            if inner is not compressor:
                check_contraction(inner)
        backward = tuple(coded("backward", parse(spec)) for spec in _listed(self.backward))
        object.__setattr__(self, "_forward", forward)
        object.__setattr__(self, "_backward", backward)
        object.__setattr__(self, "evaluation_coder", coded("evaluation", parse(self.evaluation)))
        check_type("store", self.store, Place, "a thinwire.store.Memory(...), Disk(path, ...) or Centers(...)")
        if self.adapt is not None:
            _check_choices(self.adapt, forward)
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

    @property
    def keeps(self) -> bool:
        """Whether records are kept at any boundary."""
        return any(isinstance(compressor, Delta) for compressor in self._forward)

    def keeps_at(self, boundary: int) -> bool:
        """Whether records are kept at ``boundary``."""
        return isinstance(self._forward[boundary % len(self._forward)], Delta)

    def choices(self, direction: Direction) -> tuple[Compressor, ...]:
        """Return the compressors to choose from by link (``adapt``)."""
        assert self.adapt is not None
        return tuple(parse(spec) for spec in (self.adapt.forward if direction == "forward" else self.adapt.backward))

    def coder_at(self, boundary: int, direction: Direction, choice: int | None = None) -> Coded:
        """Return the compressor of activations, of their change, or of gradients at a boundary: one of `choices`, or by
        default the one that was given."""
        if choice is not None:
            compressor = self.choices(direction)[choice]
        else:
            given = self._forward if direction == "forward" else self._backward
            compressor = given[boundary % len(given)]
        return coded(direction, coder_of(compressor))

    def check(self, num_stages: int) -> None:
        """Raise ``ValueError`` unless there is one compressor, or one for each boundary of ``num_stages`` stages."""
        for name, compressors in (("forward", self._forward), ("backward", self._backward)):
            if len(compressors) not in (1, max(1, num_stages - 1)):
                raise ValueError(
                    f"{name} has {len(compressors)} compressors for {num_stages - 1} boundaries: give one, or as many"
                )

    def record(self, num_stages: int) -> dict[str, str]:
        """Return the options that all ranks must have in common."""
        place = {"kind": type(self.store).__name__, **self.store.facts()}
        return {
            "wire format": str(FORMAT_VERSION),
            "num_stages": str(num_stages),
            "forward": "; ".join(map(str, self._forward)),
            "backward": "; ".join(map(str, self._backward)),
            "evaluation": str(self.evaluation_coder),
            "precision": str(self.precision),
            "seed": str(self.seed),
            "warmup_epochs": str(self.warmup_epochs),
            "check_every": str(self.check_every),
            "max_length": str(self.max_length),
            "adapt": str(self.adapt),
            **{f"store {name}": str(value) for name, value in place.items()},
        }


def _check_choices(adapt: ByLink, given: Sequence[Compressor]) -> None:
    check_type("adapt", adapt, ByLink, "thinwire.policies.ByLink(...)")
    forward = [parse(spec) for spec in adapt.forward]
    if len({isinstance(compressor, Delta) for compressor in (*forward, *given)}) > 1:
        raise ValueError(
            "messages are kept at all boundaries and for all choices or for none: give forward= and ByLink(forward=) "
            "delta(...) throughout, or nowhere"
        )
    for compressor in forward:
        inner = coded("forward", coder_of(compressor))
        if inner is not compressor:
            check_contraction(inner)
    for spec in adapt.backward:
        coded("backward", parse(spec))


def _listed(specs: Specs) -> Sequence[str | Compressor]:
    if isinstance(specs, str | Compressor):
        return [specs]
    if not specs:
        raise ValueError("no compressor is given: name one, or one for each boundary")
    return specs


def coded(name: str, compressor: Compressor) -> Coded:
    """Return ``compressor``, if activations or gradients can be sent in it.

    Raises:
        ValueError: They cannot; ``name`` is that of the option.
    """
    if isinstance(compressor, Delta):
        raise ValueError(
            f"{name}={compressor}: only activations on their way forward are compared with their last visit; give "
            f"{compressor.inner}"
        )
    check_stateless(compressor)
    assert isinstance(compressor, Coded)
    return compressor


def fitted(coder: Coded, crossing: BoundaryTensors) -> tuple[Coded, ...]:
    """Return the compressor of each activation that crosses, for samples of that shape.

    Raises:
        ValueError: It cannot take such samples.
    """
    return tuple(_fitted(coder, crossing.specs[i].shape[1:]) for i in crossing.floats)


def _fitted(coder: Coded, shape: Sequence[int]) -> Coded:
    if isinstance(coder, Raw):
        return coder
    try:
        fitted = coder.fit(shape or (1,))
    except Unsuited as why:
        raise ValueError(f"{coder} cannot code activations of shape {tuple(shape)} a sample: {why}") from None
    if isinstance(fitted, Raw):
        raise ValueError(f"{coder} cannot code activations of shape {tuple(shape)} a sample: they would be sent raw")
    return coded("the compressor", fitted)
