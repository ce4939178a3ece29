"""Specs: the text of a compressor, ``"minmax(bits=4, bucket=128)"``, and back."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from keyword import kwlist

from thinwire.compressors._core.compressor import Compressor

_registry: dict[str, Callable[..., Compressor]] = {}
_EXAMPLE = "minmax(bits=4, bucket=128)"
_MOST_CHARACTERS = 10_000
"""Longest spec that is read. Specs come from checkpoints and files, too."""
_MOST_GUESSES = 20
"""Words of an invalid spec that are compared with the names of compressors."""
_COMPRESSOR = re.compile("Compressor|Coded|Summed|Sparsifier")
_one_at_a_time = threading.Lock()
_NAME = re.compile(r"[A-Za-z_]\w*")
_WORDS = re.compile(rf"\b(?:{'|'.join(sorted(set(kwlist) - {'True', 'False', 'None'}))})\b")
"""Keywords of Python, which a spec may contain as values: ``block=global``."""


def register(make: Callable[..., Compressor], name: str | None = None) -> Callable[..., Compressor]:
    """Make a compressor available to `parse`: a class under its ``spec_name``, or a function under ``name``.

    Other packages declare it in the entry point group ``thinwire.compressors`` instead.
    """
    name = name or str(getattr(make, "spec_name", None) or make.__name__)
    known = _registry.setdefault(name, make)
    if known is not make:
        raise ValueError(f"the name {name!r} already belongs to {known.__module__}.{known.__qualname__}")
    return make


def registered() -> dict[str, Callable[..., Compressor]]:
    """Return compressors by name: those of thinwire, and of other packages as far as they were used."""
    return dict(_registry)


PRESETS = {
    "8bit": "minmax(bits=8, bucket=128)",
    "4bit": "minmax(bits=4, bucket=128)",
    "2bit": "ef(minmax(bits=2, bucket=128))",
    "bf16": "cast(bf16)",
}
"""Short names for specs."""
_OTHER_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "cast(fp16)"),
    **dict.fromkeys(("none", "fp32", "float32", "off"), "raw"),
}
"""What users write for a spec, without case and hyphens."""
_FLOAT_BITS = re.compile(r"(?:fp|f|float|nvfp|mxfp)([48])(?:e\dm\d\w*)?|e[45]m[23]\w*")
"""Floats of few bits, without case and hyphens. `rangefloat` is the compressor whose values are such."""
_LONGEST_REWRITTEN = 200
"""Characters of an invalid spec that is rewritten; a longer one is no slip of a user's."""
_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(\d+(?:\.\d*)?)\s*%", lambda percent: f"{float(percent[1]) / 100:g}"),
    (r"\b([2-8])[-_ ]?bits?\b", lambda bits: PRESETS.get(f"{bits[1]}bit", f"minmax(bits={bits[1]})")),
    (rf"\b(?:{'|'.join(PRESETS)})\b", lambda preset: PRESETS[preset[0]]),
    (r"\berror[-_ ]?feedback\b", "ef"),
    (r"\b(?:ratio|fraction|sparsity)\s*=", "density="),
    (r"^bits?\s*=\s*(\d+)", r"minmax(bits=\1)"),
    (r"^density\s*=\s*([\d.]+)", r"topk(density=\1)"),
    (r"^rank\s*=\s*(\d+)", r"powersgd(rank=\1)"),
    (
        r"^([A-Za-z_]\w*)\s+(?:(\w+)[\s=]+)?([\d.]+)$",
        lambda call: f"{call[1]}({call[2] or ''}{'=' * bool(call[2])}{call[3]})",
    ),
    (r"(?i)\bsign[-_ ]?sgd\b", "sign"),
    (r"(?i)^dgc(?:\(\s*\))?$", "dgc(topk(density=0.001))"),
    (r"(?i)^dgc\(\s*density\s*=\s*([\d.]+)\s*\)$", r"dgc(topk(density=\1))"),
    (r"^ef\(\s*\)$", "ef(minmax(bits=2))"),
    (r"^ef(?:\s*=\s*True)?$", f"ef({_EXAMPLE})"),
    (r"^(.+?)\s*[,+]\s*ef(?:\s*=\s*True)?\s*(\)?)$", r"ef(\1\2)"),
    (r"^ef\s*\+\s*(.+)$", r"ef(\1)"),
)
"""What users write, and what they mean by it: ``topk(1%)``, ``bits=4``, ``minmax(bits=4, ef=True)``, ``4bit+ef``."""


def parse(spec: str | Compressor) -> Compressor:
    """Return the compressor of a spec: ``parse("minmax(bits=4, bucket=128)") == MinMax(bits=4, bucket=128)``.

    ``topk(density=0.01) | minmax(bits=8)`` codes the values that the first chooses. Nothing in the spec is evaluated.
    Positional values belong to the parameters in their order. ``8bit``, ``4bit``, ``2bit`` and ``bf16`` are `PRESETS`.

    Raises:
        ValueError: the spec is invalid, or names a compressor or a parameter that does not exist; the error shows the
            position and the closest valid spec. Or a parameter is out of range.
        TypeError: a parameter has the wrong type.
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"a compressor's spec must be a string such as 'minmax(bits=4)', not {spec!r}")
    text = PRESETS.get(spec.strip(), spec.strip())
    try:
        tree = _tree(text)
        return _Reader(text).compressor(tree)
    except SyntaxError as error:
        raise _not_a_spec(text, _Refused((error.offset or 1) - 1, error.msg)) from None
    except _Refused as refused:
        raise _not_a_spec(text, refused) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r}... is not a spec: it is nested too deeply") from None


def expression(text: str) -> ast.expr:
    """Return the syntax tree of an untrusted text. Nothing in it is evaluated.

    Raises:
        ValueError: the text is longer than 10 000 characters, or nested too deeply.
        SyntaxError: it is not an expression.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{text[:40]!r}... has {len(text)} characters: at most {_MOST_CHARACTERS} are read")
    try:
        # Python before 3.12 counts the depth of all threads' trees together (CPython issue 106905).
        with _one_at_a_time:
            return ast.parse(text.strip(), mode="eval").body
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r}... is nested too deeply") from None


def _tree(text: str) -> ast.expr:
    return expression(_WORDS.sub(lambda word: word[0].upper(), text))


class _Refused(ValueError):
    """A text is not a spec. What may have been meant is not looked for yet, as candidates are refused as well."""

    def __init__(self, at: int, why: str, nearest: str | None = None, *, unknown: bool = False) -> None:
        super().__init__(why)
        self.at, self.why, self.nearest, self.unknown = at, why, nearest, unknown


class _Reader:
    """Makes compressors from the nodes of a spec's syntax tree; raises `_Refused`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def compressor(self, node: ast.expr) -> Compressor:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.compressor(node.left) | self.compressor(node.right)
        called = node.func if isinstance(node, ast.Call) else node
        if not isinstance(called, ast.Name):
            raise _Refused(node.col_offset, "a compressor's name must stand there")
        make = self._find(called)
        values = self._values(node, called.id, make) if isinstance(node, ast.Call) else {}
        for name, parameter in inspect.signature(make).parameters.items():
            if parameter.default is parameter.empty and name not in values:
                raise _Refused(node.col_offset, f"{called.id} needs its parameter {name}")
        return make(**values)

    def _values(self, node: ast.Call, called: str, make: Callable[..., Compressor]) -> dict[str, object]:
        parameters = inspect.signature(make).parameters
        names = list(parameters)
        if len(node.args) > len(names):
            raise _Refused(
                node.args[len(names)].col_offset,
                f"{called} takes at most {len(names)} parameters: {', '.join(names)}"
                if names
                else f"{called} takes none",
            )
        values = {n: self._value(arg, parameters[n]) for n, arg in zip(names, node.args, strict=False)}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg not in names:
                takes = f"it takes {', '.join(names)}" if names else "it takes none"
                close = difflib.get_close_matches(keyword.arg or "", names, n=1, cutoff=0.5)
                raise _Refused(
                    keyword.col_offset,
                    f"{called} has no parameter {keyword.arg!r}: {takes}",
                    self._replaced(keyword.col_offset, len(keyword.arg or ""), close),
                )
            if keyword.arg in values:
                raise _Refused(keyword.col_offset, f"{keyword.arg} is given twice")
            values[keyword.arg] = self._value(keyword.value, parameters[keyword.arg])
        return values

    def _value(self, node: ast.expr, parameter: inspect.Parameter) -> object:
        # `truncate` may be a compressor or a value, depending on the parameter.
        if isinstance(node, ast.Name) and not _COMPRESSOR.search(str(parameter.annotation)):
            return self._text[node.col_offset : node.end_col_offset]
        if isinstance(node, ast.Name | ast.Call | ast.BinOp):
            return self.compressor(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise _Refused(node.col_offset, f"{ast.unparse(node)} is not a plain value") from None

    def _find(self, node: ast.Name) -> Callable[..., Compressor]:
        name = node.id
        if name in _registry:
            return _registry[name]
        for point in entry_points(group="thinwire.compressors"):
            if point.name == name:
                return register(point.load(), name)
        if name.lower() == "auto":
            raise ValueError(
                "auto is no compressor: it chooses those of all layers, and goes alone as the compressor of a "
                'DistributedDataParallel model, thinwire.compress(model, "auto")'
            )
        close = _close(name, _registry)
        replaced = self._replaced(node.col_offset, len(name), close)
        raise _Refused(node.col_offset, f"no compressor is called {name!r}", replaced, unknown=not close)

    def _replaced(self, at: int, length: int, by: list[str]) -> str | None:
        """Return the text with the name at ``at`` replaced, if that makes it a valid spec."""
        if not by:
            return None
        text = self._text[:at] + by[0] + self._text[at + length :]
        return text if _reads(text) else None


def _reads(text: str) -> bool:
    """Whether ``text`` is a spec."""
    try:
        _Reader(text).compressor(_tree(text))
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return False
    return True


def _not_a_spec(text: str, refused: _Refused) -> ValueError:
    if not text:
        return ValueError("'' is not a spec: it is empty. Did you mean '4bit'? 'raw' sends everything as it is")
    meant = _meant(text)
    why = refused.why
    if refused.unknown and not meant:
        why += f": there are {', '.join(sorted(_registry))}"
    nearest = [meant or refused.nearest or _nearest(text)]
    if (few := _FLOAT_BITS.fullmatch(_plain(text))) is not None:
        nearest += [f"rangefloat(bits={few[1] or 8})"]
    asked = " or ".join(map(repr, nearest))
    return ValueError(f"{text!r} is not a spec: at character {refused.at + 1}, {why}. Did you mean {asked}?")


def _close(word: str, names: Iterable[str]) -> list[str]:
    """Return the name that is most like ``word``, whatever the case and the hyphens; an empty list if none is."""
    plain = {_plain(name): name for name in names}
    return [plain[name] for name in difflib.get_close_matches(_plain(word), plain, n=1)]


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]", "", word).lower()


def _meant(text: str) -> str | None:
    """Return what ``4bits``, ``4-bit``, ``int4``, ``bfloat16`` or ``none`` mean, and what `_REWRITES` makes a spec."""
    plain = _plain(text)
    if (few := _FLOAT_BITS.fullmatch(plain)) is not None:
        return f"{few[1] or 8}bit"
    bits = re.fullmatch(r"(?:([2-8])bits?|(?:bits?|u?int)([2-8]))", plain)
    if bits:
        width = bits[1] or bits[2]
        return f"{width}bit" if f"{width}bit" in PRESETS else f"minmax(bits={width})"
    if plain in _OTHER_NAMES or len(text) > _LONGEST_REWRITTEN:
        return _OTHER_NAMES.get(plain)
    rewritten = text
    for written, meant in _REWRITES:
        rewritten = re.sub(written, meant, rewritten)
    return rewritten if rewritten != text and _parses(rewritten) else None


def _nearest(text: str) -> str:
    """Return a valid spec close to an invalid one: with brackets closed, or of a compressor with a similar name."""
    for candidate in (text + ")", text + "))", text.rstrip(",(= ") + ")", text.removesuffix(")"), text.split("(")[0]):
        if candidate != text and candidate.strip() and _parses(candidate):
            return candidate.strip()
    for word in _NAME.findall(text)[:_MOST_GUESSES]:
        close = _close(word, _registry)
        if close and _parses(close[0]):
            return str(_registry[close[0]]())
    return _EXAMPLE


def _parses(text: str) -> bool:
    """Whether ``text`` is a spec of one registered compressor."""
    try:
        tree = _tree(text.strip())
    except SyntaxError:
        return False
    name = tree.func if isinstance(tree, ast.Call) else tree
    return isinstance(name, ast.Name) and name.id in _registry and _reads(text.strip())
