"""Specs: the text of a compressor, ``"minmax(bits=4, bucket=128)"``, and back."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from thinwire.compressors.base import Compressor

_registry: dict[str, Callable[..., Compressor]] = {}


def register(make: Callable[..., Compressor], name: str | None = None) -> Callable[..., Compressor]:
    """Make a compressor known to `parse`: a class under its ``spec_name``, or a function under ``name``.

    A package outside thinwire names it under the entry point group ``thinwire.compressors`` instead.
    """
    name = name or str(getattr(make, "spec_name", None) or make.__name__)
    known = _registry.setdefault(name, make)
    if known is not make:
        raise ValueError(f"the name {name!r} already belongs to {known.__module__}.{known.__qualname__}")
    return make


def parse(spec: str | Compressor) -> Compressor:
    """The compressor of a spec: ``parse("minmax(bits=4, bucket=128)") == MinMax(bits=4, bucket=128)``.

    Nothing in the spec is evaluated. Positional values go to the parameters in their order.

    Raises:
        ValueError: the text is not a spec, or names a compressor or a parameter that does not exist.
    """
    if isinstance(spec, Compressor):
        return spec
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{spec!r} is not a spec such as 'minmax(bits=4, bucket=128)': {error.msg}") from None
    return _build(tree, spec)


def _build(tree: ast.expr, spec: str) -> Compressor:
    if isinstance(tree, ast.Name):
        tree = ast.Call(func=tree, args=[], keywords=[])
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError(f"{spec!r} is not a spec such as 'minmax(bits=4, bucket=128)'")
    called = tree.func.id
    make = _find(called)
    names = list(inspect.signature(make).parameters)
    if len(tree.args) > len(names):
        raise ValueError(f"{called} takes at most {len(names)} parameters: {', '.join(names)}")
    values = {name: _value(node, spec) for name, node in zip(names, tree.args, strict=False)}
    for keyword in tree.keywords:
        if keyword.arg not in names:
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            raise ValueError(f"{called} has no parameter {keyword.arg!r}: {takes}")
        if keyword.arg in values:
            raise ValueError(f"{keyword.arg} is given twice in {spec!r}")
        values[keyword.arg] = _value(keyword.value, spec)
    return make(**values)


def _value(node: ast.expr, spec: str) -> object:
    if isinstance(node, ast.Name) and node.id not in _registry:
        return node.id
    if isinstance(node, ast.Name | ast.Call):
        return _build(node, spec)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{ast.unparse(node)} in {spec!r} is not a plain value") from None


def _find(name: str) -> Callable[..., Compressor]:
    if name in _registry:
        return _registry[name]
    for point in entry_points(group="thinwire.compressors"):
        if point.name == name:
            return register(point.load(), name)
    close = difflib.get_close_matches(name, _registry, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(_registry))}"
    raise ValueError(f"no compressor is called {name!r}: {hint}")
