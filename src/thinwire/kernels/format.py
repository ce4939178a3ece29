"""The bucketed formats, and the size of their payloads: a function of element count and format, known to both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp, isfinite, lcm
from typing import TYPE_CHECKING, Literal, NamedTuple

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
        self._check_types()
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be 1 to 8, not {self.bits}")
        if not 1 <= self.bucket <= MAX_BUCKET:
            raise ValueError(f"bucket must be 1 to 2**62 elements, not {self.bucket}")
        for name, value, known in (("scheme", self.scheme, SCHEMES), ("rounding", self.rounding, ROUNDINGS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
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
        """Largest code that is sent."""
        return int(2 * self.offset) if self.offset >= 0 else self.steps

    def _check_types(self) -> None:
        for name in ("bits", "bucket", "levels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        if not isinstance(self.midrise, bool):
            raise TypeError(f"midrise must be a bool, not {type(self.midrise).__name__}")
        if not isinstance(self.clip, (int, float)) or isinstance(self.clip, bool):
            raise TypeError(f"clip must be a float, not {type(self.clip).__name__}")

    def _check_scheme(self) -> None:
        if self.rounding == "shift" and self.scheme != "minmax":
            raise ValueError(f"rounding shift is for scheme minmax, not {self.scheme}")
        if (self.midrise or self.clip) and self.scheme != "maxabs":
            raise ValueError(f"midrise and clip are for scheme maxabs, not {self.scheme}")
        if not (self.clip >= 0 and isfinite(self.clip)):
            raise ValueError(f"clip must be 0 (none) or a positive number of root mean squares, not {self.clip}")
        if self.scheme in ("sides", "sign") and self.bits != 1:
            raise ValueError(f"scheme {self.scheme} has bits=1, not {self.bits}")
        if self.scheme not in ("maxabs", "norm") or self.midrise:
            if self.levels:
                raise ValueError("levels are for the schemes maxabs (not midrise) and norm: leave them at 0")
            return
        if self.bits < 2:
            raise ValueError(f"scheme {self.scheme} needs bits of 2 to 8 for levels on both sides of zero, not 1")
        if not 0 <= self.levels <= 2 ** (self.bits - 1) - 1:
            raise ValueError(
                f"levels must be 1 to {2 ** (self.bits - 1) - 1} at {self.bits} bits (or 0 for that), not {self.levels}"
            )


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


def codes_at(numel: int, form: Format) -> int:
    """Return the byte at which the codes start inside a payload: behind the scales of every bucket."""
    return align(4 * form.num_scales * num_buckets(numel, form.bucket))


def bucketed_bytes(numel: int, form: Format) -> int:
    """Return the payload size in bytes of one segment of ``numel`` elements: a multiple of 64, and 0 for 0 elements.

    Raises ``ValueError`` for a negative ``numel``.
    """
    check_format(form)
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return codes_at(numel, form) + align(-(-numel // GROUP) * 16 * form.bits)


def bucketed_grain(bucket: int) -> int:
    """Return the elements at which a layer may be cut so that its pieces get the bytes they get inside the whole."""
    if not isinstance(bucket, int) or isinstance(bucket, bool):
        raise TypeError(f"bucket must be an int, not {type(bucket).__name__}")
    if not 1 <= bucket <= MAX_BUCKET:
        raise ValueError(f"bucket must be 1 to 2**62 elements, not {bucket}")
    return lcm(bucket, GROUP)


def check_format(form: Format) -> None:
    """Raise ``TypeError`` unless ``form`` is one."""
    if not isinstance(form, Format):
        raise TypeError(f"form must be a thinwire.kernels.Format, not {type(form).__name__}")


def before_sum(scale: float) -> float:
    """Return the factor of the terms of a mean before they are added, with which their sum overflows only if their mean
    does: the largest power of two up to ``scale``, which loses no bit of a normal number; 1 for sums."""
    return 2.0 ** (frexp(scale)[1] - 1) if 2.0**-126 <= scale < 1.0 else 1.0
