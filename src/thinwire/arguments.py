"""Arguments: calls written as text, ``"minmax(bits=4)"``, checks of values, corrections of names, and warnings."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import operator
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import kwlist
from numbers import Real
from types import UnionType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MOST_CHARACTERS = 10_000
"""Length of the longest text that is read. Texts are also read from checkpoints and files."""
_MOST_GUESSES = 20
"""Number of words of an invalid text that are compared with names."""
_WORDS = re.compile(rf"\b(?:{'|'.join(sorted(set(kwlist) - {'True', 'False', 'None'}))})\b")
"""Pattern of Python's keywords, which a text may contain as values: ``block=global``."""
_one_at_a_time = threading.Lock()


def check_type(name: str, value: object, kinds: type | UnionType, expected: str, hint: str = "") -> None:
    """Raise a TypeError unless an argument is an instance of ``kinds``, which a reader knows as ``expected``."""
    if not isinstance(value, kinds):
        shown = repr(value) if len(repr(value)) <= 100 else f"a {type(value).__name__}"
        raise TypeError(f"{name} must be {expected}, not {shown}{_after(hint)}")


def check_int(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> None:
    """Raise an error unless an argument is an integer of at least ``low``, and of at most ``high``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}{_after(hint)}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, not {value}{_after(hint)}")


def check_number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> None:
    """Raise an error unless an argument is a finite number within bounds, which ``above`` and ``below`` exclude."""
    number: float = value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}{_after(hint)}")
    tests = (("at least", low, operator.ge), ("above", above, operator.gt))
    tests += (("at most", high, operator.le), ("below", below, operator.lt))
    bounds = [(words, bound, holds) for words, bound, holds in tests if bound is not None]
    # Integers may be too large for floats.
    if not -math.inf < number < math.inf or not all(holds(number, bound) for _, bound, holds in bounds):
        within = [f"{words} {bound:g}" for words, bound, _ in bounds]
        within += ["finite"] if high is None and below is None else []
        raise ValueError(f"{name} must be {' and '.join(within)}, not {value}{_after(hint)}")


def check_choice(name: str, value: Any, choices: Sequence[object], hint: str = "") -> None:
    """Raise a ValueError unless an argument is one of a few values."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(str, choices))}, not {value!r}{_after(hint)}")


def _after(hint: str) -> str:
    return f": {hint}" if hint else ""


def close_names(word: str, names: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names that are most like ``word``, whatever the case and the hyphens."""
    plain = {_plain(name): name for name in names}
    return [plain[name] for name in difflib.get_close_matches(_plain(word[:100]), plain, n=most, cutoff=cutoff)]


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]", "", word).lower()


class _RefusedError(ValueError):
    """An invalid text. Corrections are not searched for yet, as their candidates may be invalid as well."""

    def __init__(self, at: int, why: str, nearest: str | None = None) -> None:
        super().__init__(why)
        self.at, self.why, self.nearest = at, why, nearest


@dataclass(frozen=True)
class Calls(Generic[T]):
    """The calls that texts such as ``minmax(bits=4)`` may contain. Nothing in a text is evaluated.

    Values are literals, words, or calls again where a parameter is annotated with one of ``nested``. A parameter that
    is annotated as a string takes a call as text.
    """

    kind: str
    """Kind of object that a call makes, as errors name it."""
    what: str
    """Name of such a text in errors."""
    example: str
    find: Callable[[str], Callable[..., T] | None]
    """Function that returns the function of a name; None if there is none."""
    names: Callable[[], Iterable[str]]
    """Function that returns the names that an error may suggest."""
    nested: tuple[str, ...]
    presets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Whole texts by their short names."""
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    """Valid texts by their other spellings, in lower case without hyphens."""

    def parse(self, text: str) -> T:
        """Return the object that a text makes.

        Raises:
            ValueError: the text is invalid, or has a name or a parameter that does not exist; the error shows the
                position and the closest valid text. Or an argument is out of range.
            TypeError: an argument has the wrong type.
        """
        check_type(f"a {self.kind}", text, str, f"a string such as {self.example!r}")
        text = text.strip()
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"{text[:40]!r}... has {len(text)} characters: at most {_MOST_CHARACTERS} are read")
        try:
            return self._read(text)
        except SyntaxError as error:
            refused = _RefusedError((error.offset or 1) - 1, error.msg)
        except _RefusedError as error:
            refused = error
        except (RecursionError, MemoryError):
            raise ValueError(f"{text[:40]!r}... is not a {self.what}: it is nested too deeply") from None
        why = f"at character {refused.at + 1}, {refused.why}" if text else "it is empty"
        guess = self._meant(text) or refused.nearest or self._nearest(text)
        if guess is None:
            why += f". There are {', '.join(sorted(self.names()))}, as in {self.example!r}"
        raise ValueError(f"{text!r} is not a {self.what}: {why}{f'. Did you mean {guess!r}?' if guess else ''}")

    def _read(self, text: str) -> T:
        text = self.presets.get(text, text)
        return self._made(_tree(_WORDS.sub(lambda word: word[0].upper(), text)), text)

    def _reads(self, text: str) -> bool:
        try:
            self._read(text)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return False
        return True

    def _made(self, node: ast.expr, text: str) -> T:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return operator.or_(self._made(node.left, text), self._made(node.right, text))
        called = node.func if isinstance(node, ast.Call) else node
        if not isinstance(called, ast.Name):
            raise _RefusedError(node.col_offset, "a name must stand there")
        make = self.find(called.id)
        if make is None:
            close = _replaced(text, called, called.id, close_names(called.id, self.names()))
            raise _RefusedError(called.col_offset, f"no {self.kind} is called {called.id!r}", close)
        parameters = inspect.signature(make).parameters
        values = self._values(node, called.id, parameters, text) if isinstance(node, ast.Call) else {}
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in values:
                raise _RefusedError(node.col_offset, f"{called.id} needs its parameter {name}")
        return make(**values)

    def _values(
        self, node: ast.Call, called: str, parameters: Mapping[str, inspect.Parameter], text: str
    ) -> dict[str, object]:
        takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
        placed = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if len(node.args) > len(placed):
            how = "by position" if placed or not parameters else "but by name"
            why = f"{called} takes {len(placed) or 'no'} parameters {how}: {takes}"
            raise _RefusedError(node.args[len(placed)].col_offset, why)
        values = {n: self._value(arg, parameters[n], text) for n, arg in zip(placed, node.args, strict=False)}
        for keyword in node.keywords:
            name = keyword.arg or "**"
            if name not in parameters:
                close = _replaced(text, keyword, name, close_names(name, parameters))
                raise _RefusedError(keyword.col_offset, f"{called} has no parameter {name!r}: {takes}", close)
            if name in values:
                raise _RefusedError(keyword.col_offset, f"{name} is given twice")
            values[name] = self._value(keyword.value, parameters[name], text)
        return values

    def _value(self, node: ast.expr, parameter: inspect.Parameter, text: str) -> object:
        # `truncate` may be a compressor or a value, depending on the parameter.
        kinds = set(re.findall(r"\w+", str(parameter.annotation)))
        if isinstance(node, ast.Name | ast.Call | ast.BinOp) and not kinds.isdisjoint(self.nested):
            return self._made(node, text)
        source = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.Name):
            return source
        try:
            return ast.literal_eval(_tree(source))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            if "str" in kinds:
                return ast.unparse(node)
            raise _RefusedError(node.col_offset, f"{source} is not a plain value") from None

    def _meant(self, text: str) -> str | None:
        """Return the text with a user's other spelling of a name replaced by the name."""
        others = {**self.presets, **self.others}
        unknown = {name: meant for name, meant in others.items() if name not in self.names()}
        meant = others.get(_plain(text)) or re.sub(r"\w+", lambda word: unknown.get(_plain(word[0]), word[0]), text)
        return meant if meant != text and self._reads(meant) else None

    def _nearest(self, text: str) -> str | None:
        """Return a valid text close to an invalid one: with brackets closed, or of a similar name."""
        if not text:
            return self.example
        if self._reads(text + ")"):
            return text + ")"
        for word in (re.split(r"[(=]", text)[0], *re.findall(r"\w+", text)[:_MOST_GUESSES]):
            if (other := self.others.get(_plain(word))) is not None and self._reads(other):
                return other
            for name in close_names(word, [*self.presets, *self.names()]):
                if self._reads(name):
                    return name if name in self.presets else str(self._read(name))
        return None


def _replaced(text: str, node: ast.expr | ast.keyword, word: str, by: Sequence[str]) -> str | None:
    return text[: node.col_offset] + by[0] + text[node.col_offset + len(word) :] if by else None


def _tree(text: str) -> ast.expr:
    # Python before 3.12 counts the depth of all threads' trees together (CPython issue 106905).
    with _one_at_a_time:
        return ast.parse(text, mode="eval").body


def warn_caller(text: str) -> None:
    """Warn at the line that called thinwire, however many of its own functions lie between.

    A fixed ``stacklevel`` is wrong as soon as a second public function leads to the same warning.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "thinwire":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
