"""The bucketed formats, and the size of their payloads: a function of element count and format, known to both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp, lcm
from typing import TYPE_CHECKING, Literal, NamedTuple

from thinwire.arguments import check_choice, check_int, check_number, check_type

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 128
"""Codes are packed in groups of this many, counted from the start of a row; a group takes ``16 * bits`` bytes."""

ALIGN = 64
"""Payloads, and the codes inside them, start at multiples of this many bytes."""

MAX_BUCKET = 2**62
"""A bucket may be larger than any layer ("the whole layer"), but must fit the core's 64-bit arithmetic."""

SCHEMES = ("minmax", "maxabs", "norm", "sides", "sign")
ROUNDINGS = ("stochastic", "nearest", "shift")


@dataclass(frozen=True)
class Format:
    """Codes and scales of buckets of values, which are received as ``lo + code · unit``, both per bucket.

    - ``minmax``: 2^bits levels from the bucket's minimum to its maximum (thesis, section 5.6.1);
    - ``maxabs``: 2·levels + 1 levels from −a to a, a = max|x| (AQ-SGD, section 4.1); at 2 bits TernGrad's;
    - ``norm``: the same with a = ‖x‖₂ (QSGD; thesis, section 2.2.3);
    - ``sides``: a bit for x >= 0, received as the mean of the bucket's values on that side (1-bit SGD);
    - ``sign``: a bit for x >= 0, received as ±mean|x| (signSGD).

    ``rounding`` is ``stochastic`` (unbiased), ``nearest``, or, for minmax, ``shift``: to nearest on a lattice that one
    draw shifts for a whole row (QSDP; thesis, definition 1). Sides and sign do not round.

    ``levels`` is L, the steps on each side of zero of maxabs and norm; 0 means 2^(bits−1) − 1. ``midrise`` divides
    maxabs's [−a, a] into 2^bits intervals, received as their midpoints, without a zero. ``clip`` bounds maxabs's a by
    ``clip`` times the bucket's root mean square, beyond which values saturate; 0 does not.

    Raises ``TypeError`` or ``ValueError`` for what does not fit together.
    """

    bits: int = 4
    bucket: int = 128
    scheme: Literal["minmax", "maxabs", "norm", "sides", "sign"] = "minmax"
    rounding: Literal["stochastic", "nearest", "shift"] = "stochastic"
    levels: int = 0
    midrise: bool = False
    clip: float = 0.0
    steps: int = field(init=False, repr=False, compare=False)
    """Number of units from −a to 0, or from minimum to maximum."""
    offset: float = field(init=False, repr=False, compare=False)
    """The code of 0 where there is one scale; −1 where there are two."""
    packed: tuple[int, int, float] = field(init=False, repr=False, compare=False)
    """The format as the native core takes it."""

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        check_choice("scheme", self.scheme, SCHEMES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_type("midrise", self.midrise, bool, "a bool")
        check_number("clip", self.clip, low=0, hint="a number of root mean squares, or 0 for none")
        self._check_scheme()
        half = 2 ** (self.bits - 1)
        steps, offset = self.levels or half - 1, -1.0
        if self.scheme == "minmax":
            steps = 2 * half - 1
        elif self.scheme in ("sides", "sign"):
            steps, offset = 1, -1.0 if self.scheme == "sides" else 0.5
        elif self.midrise:
            steps, offset = half, half - 0.5
        else:
            offset = float(steps)
        scheme, rounding = SCHEMES.index(self.scheme), ROUNDINGS.index(self.rounding)
        code = self.bits | scheme << 8 | rounding << 16 | self.midrise << 24 | steps << 32
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "packed", (code, self.bucket, float(self.clip)))

    def __hash__(self) -> int:
        return hash(self.packed)

    @property
    def num_scales(self) -> int:
        """Number of fp32 values per bucket: ``lo`` and ``unit``, or ``unit`` alone."""
        return 2 if self.offset < 0 else 1

    @property
    def max_code(self) -> int:
        return int(2 * self.offset) if self.offset >= 0 else self.steps

    def _check_scheme(self) -> None:
        """Raise a ``ValueError`` for parameters that the scheme does not have."""
        if self.rounding == "shift" and self.scheme != "minmax":
            raise ValueError(f"rounding shift is for scheme minmax, not {self.scheme}")
        if (self.midrise or self.clip) and self.scheme != "maxabs":
            raise ValueError(f"midrise and clip are for scheme maxabs, not {self.scheme}")
        if self.scheme in ("sides", "sign"):
            check_int(f"bits of scheme {self.scheme}", self.bits, 1, 1)
        stepped = self.scheme in ("maxabs", "norm") and not self.midrise
        if stepped:
            check_int(f"bits of scheme {self.scheme}", self.bits, 2, hint="levels lie on both sides of zero")
        hint = "they are for the schemes maxabs (not midrise) and norm, and 0 is the most of as many bits"
        check_int("levels", self.levels, 0, 2 ** (self.bits - 1) - 1 if stepped else 0, hint)


class Residual(NamedTuple):
    """Error feedback in the same pass: what is encoded is ``v = s + loss_scale · now``, what is kept
    ``next = (v − decoded)/loss_scale``.

    Both are fp32 tensors aligned with the values (elements,); ``next`` may be ``now``, and else overlaps nothing.
    """

    now: Tensor
    next: Tensor
    loss_scale: float = 1.0


def align(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of :data:`ALIGN`."""
    return -(-num_bytes // ALIGN) * ALIGN


def num_buckets(numel: int, bucket: int) -> int:
    """Return the number of buckets of ``numel`` elements; the last one may be short."""
    return -(-numel // bucket)


def code_bytes(numel: int, bits: int) -> int:
    """Return the bytes of the packed codes of ``numel`` elements. Raises ``ValueError`` if they are negative."""
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return -(-numel // GROUP) * 16 * bits


def codes_at(numel: int, form: Format) -> int:
    """Return the byte at which the codes start inside a payload: behind the scales of every bucket."""
    return align(4 * form.num_scales * num_buckets(numel, form.bucket))


def bucketed_bytes(numel: int, form: Format) -> int:
    """Return the payload size in bytes of one segment of ``numel`` elements: a multiple of 64, and 0 for 0 elements.

    Raises ``ValueError`` for a negative ``numel``.
    """
    check_format(form)
    return codes_at(numel, form) + align(code_bytes(numel, form.bits))


def bucketed_grain(bucket: int) -> int:
    """Return the elements at which a layer may be cut so that its pieces get the bytes they get inside the whole."""
    check_int("bucket", bucket, 1, MAX_BUCKET)
    return lcm(bucket, GROUP)


def check_format(form: Format) -> None:
    """Raise ``TypeError`` unless ``form`` is one."""
    if not isinstance(form, Format):
        raise TypeError(f"form must be a thinwire.kernels.Format, not {type(form).__name__}")


def before_sum(scale: float) -> float:
    """Return the factor of the terms of a mean before they are added, with which their sum overflows only if their mean
    does: the largest power of two up to ``scale``, which loses no bit of a normal number; 1 for sums."""
    return 2.0 ** (frexp(scale)[1] - 1) if 2.0**-126 <= scale < 1.0 else 1.0
