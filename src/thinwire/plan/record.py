"""A plan as a file, which `thinwire plan show` reads. Nothing in the file is trusted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from thinwire.compressors import Compressor, parse
from thinwire.plan.cost import sent_bytes

FORMAT = 1
"""Version of the file format. Files of another version are refused."""
MOST_FILE_BYTES = 1 << 26
_MOST_TEXT = 2000
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 48
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class LayerRow:
    """One layer of a plan.

    Raises:
        ValueError: a value is none that a layer could have.
    """

    name: str
    shape: tuple[int, ...]
    bucket: int
    """Counted in the order in which buckets leave."""
    compressor: str
    """Spec of what the layer has."""
    reference: str
    """Spec of what the rules name for it."""
    sent_bytes: float
    """Bytes that a rank sends for the layer in a step."""
    reference_bytes: float
    """Bytes that a rank would send for it with the reference."""
    error: float | None
    """Squared L2, on the gradients that the plan was chosen for; None where none was taken."""
    reference_error: float | None

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        if not self.name:
            raise ValueError("a layer has no name")
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"layer {self.name!r}: {error}") from None

    def _check(self) -> None:
        shape: Any = self.shape
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape must be whole numbers that are not negative, not {_short(shape)}")
        if len(shape) > _MOST_DIMENSIONS or max((self.numel, *shape)) > _MOST_ELEMENTS:
            raise ValueError(f"no layer has a shape of {_short(shape)}")
        _check_int("bucket", self.bucket, 0, _MOST_ELEMENTS)
        for spec in (self.compressor, self.reference):
            _check_text("a spec", spec)
            _parsed(spec)
        for name in ("sent_bytes", "reference_bytes"):
            _check_number(name, getattr(self, name))
        for name in ("error", "reference_error"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PlanRecord:
    """What each layer has, what the rules name for it, and what both send and err, in the order of communication.

    Raises:
        ValueError: a value is none that a plan could have, or layers are out of order or there twice.
    """

    rows: tuple[LayerRow, ...]
    num_ranks: int
    step: int
    """The last one that communicated; −1 before the first."""
    policy: str
    """Spec of what chose the plan; empty if the rules did."""
    note: str
    """The note of the policy."""

    def __post_init__(self) -> None:
        _check_int("num_ranks", self.num_ranks, 1, _MOST_RANKS)
        _check_int("step", self.step, -1, _MOST_ELEMENTS)
        _check_text("policy", self.policy)
        _check_text("note", self.note)
        seen: set[str] = set()
        for row in self.rows:
            if row.name in seen:
                raise ValueError(f"layer {row.name!r} is there twice")
            seen.add(row.name)
        for before, row in pairwise(self.rows):
            if row.bucket < before.bucket:
                raise ValueError(f"layer {row.name!r} of bucket {row.bucket} comes after bucket {before.bucket}")

    @property
    def sent_bytes(self) -> float:
        """Bytes of all layers in a step."""
        return math.fsum(row.sent_bytes for row in self.rows)

    @property
    def reference_bytes(self) -> float:
        """Bytes of all layers in a step with the reference."""
        return math.fsum(row.reference_bytes for row in self.rows)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path`` as JSON."""
        layers = [{field.name: getattr(row, field.name) for field in fields(LayerRow)} for row in self.rows]
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        lines = ",\n".join("  " + json.dumps(layer, allow_nan=False) for layer in layers)
        opening = json.dumps({"thinwire_plan": FORMAT, **head}, allow_nan=False).removesuffix("}")
        Path(path).write_text(f'{opening},\n "layers": [\n{lines}\n ]}}\n', encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PlanRecord:
        """The record that `write` wrote. Nothing in the file is evaluated.

        Raises:
            ValueError: the file is no such record; the message describes what is wrong.
            OSError: it cannot be read.
        """
        try:
            return cls._from(_json_of(Path(path)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a plan that wire.plan_record().write() wrote: {error}") from None

    @classmethod
    def _from(cls, content: Any) -> PlanRecord:
        if not isinstance(content, dict) or "thinwire_plan" not in content:
            raise ValueError('it must be a JSON object with "thinwire_plan"')
        if type(content["thinwire_plan"]) is not int or content["thinwire_plan"] != FORMAT:
            raise ValueError(f"its format is {_short(content['thinwire_plan'])}, and this thinwire reads {FORMAT}")
        head = [field.name for field in fields(cls) if field.name != "rows"]
        _check_keys("it", content, ("thinwire_plan", *head, "layers"))
        if not isinstance(content["layers"], list) or not content["layers"]:
            raise ValueError("layers must be a list of at least one")
        rows = []
        for place, layer in enumerate(content["layers"]):
            what = f"layer {place}"
            if not isinstance(layer, dict):
                raise ValueError(f"{what} must be an object, not {_short(layer)}")
            _check_keys(what, layer, [field.name for field in fields(LayerRow)])
            shape = layer["shape"]
            if not isinstance(shape, list):
                raise ValueError(f"{what}: shape must be a list, not {_short(shape)}")
            rows.append(LayerRow(**{**layer, "shape": tuple(shape)}))
        return cls(tuple(rows), **{name: content[name] for name in head})


def layer_rows(
    plan: Mapping[str, Compressor],
    reference: Mapping[str, Compressor],
    shapes: Mapping[str, Sequence[int]],
    buckets: Iterable[Iterable[str]],
    num_ranks: int,
    errors: Mapping[str, float],
    reference_errors: Mapping[str, float],
) -> tuple[LayerRow, ...]:
    """The rows of a record. Bytes are those of fp32 gradients; a world of one is taken for one of two.

    Args:
        plan: what each layer has.
        reference: what the rules name; a layer that is not in it has its own compressor for reference.
        shapes: of the layers.
        buckets: names of the layers of each bucket, as they leave. Layers in none of them, all of them before the first
            step, come last, in a bucket of their own.
        num_ranks: of the world.
        errors: by layer, squared L2 errors of the plan.
        reference_errors: by layer, those of the reference.
    """
    places: dict[str, int] = {}
    after = 0
    for bucket, names in enumerate(buckets):
        after = bucket + 1
        places |= {name: bucket for name in names if name in plan and name not in places}
    places |= {name: after for name in plan if name not in places}
    rows = []
    for name, bucket in places.items():
        chosen, shape = plan[name], tuple(shapes[name])
        named = reference.get(name, chosen)
        rows.append(
            LayerRow(
                name,
                shape,
                bucket,
                str(chosen),
                str(named),
                sent_bytes(chosen, shape, max(2, num_ranks)),
                sent_bytes(named, shape, max(2, num_ranks)),
                _finite(errors.get(name)),
                _finite(reference_errors.get(name)),
            )
        )
    return tuple(rows)


def _json_of(path: Path) -> Any:
    with path.open("rb") as file:
        text = file.read(MOST_FILE_BYTES + 1)
    if len(text) > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES >> 20} MiB")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is not JSON of a plan: it is nested too deeply") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that a plan could hold")


def _check_keys(what: str, content: Mapping[str, Any], expected: Sequence[str]) -> None:
    missing = [key for key in expected if key not in content]
    unknown = [key for key in content if key not in expected]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    if unknown:
        raise ValueError(f"{what} has what no plan has: {_short(unknown)}")


def _check_text(what: str, value: Any) -> None:
    # What goes to a terminal must not be able to command it.
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{what} must be printable text, not {_short(value)}")
    if len(value) > _MOST_TEXT:
        raise ValueError(f"{what} of {len(value)} characters is too long")


def _check_int(what: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, not {_short(value)}")


def _check_number(what: str, value: Any) -> None:
    # An integer may be too large for a float.
    if type(value) not in (int, float) or not 0 <= value <= 1e300:
        raise ValueError(f"{what} must be a finite number that is not negative, not {_short(value)}")


def _parsed(spec: str) -> Compressor:
    try:
        return parse(spec)
    except (TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{_short(spec)} is not a spec ({type(error).__name__}: {_short(error)})") from None


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def printable(text: str) -> str:
    """The text as a record may hold it: of one line, without what commands a terminal, and not too long."""
    return "".join(c if c.isprintable() else " " for c in text)[:_MOST_TEXT]


def _short(value: object) -> str:
    shown = value if isinstance(value, str) else str(value)
    return repr(shown[:60] + ("..." if len(shown) > 60 else ""))
