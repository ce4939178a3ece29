"""Policies as text: ``"lgreco(every=500)"``, and back."""

from __future__ import annotations

import ast
import difflib
from dataclasses import fields
from typing import Any

from thinwire import policies
from thinwire.compressors import expression
from thinwire.policies.policy import Policy

_POLICIES = {name.lower(): name for name in ("Accordion", "Auto", "KMeans", "LGreco")}
"""The classes in `thinwire.policies` by what texts call them."""


def parse_policy(text: str | Policy) -> Policy:
    """The policy of a text: ``"lgreco(every=500, reference=accordion())"``. Nothing in it is evaluated.

    Raises:
        ValueError: there is no such policy or parameter, or a value is out of its range.
    """
    if isinstance(text, Policy):
        return text
    try:
        return _policy(expression(text))
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r}... is not a policy: it is nested too deeply") from None
    except (SyntaxError, TypeError) as error:
        raise ValueError(
            f"{text!r} is not a policy: write lgreco(every=500), or one of {', '.join(_POLICIES)} ({error})"
        ) from None


def _policy(node: ast.expr) -> Policy:
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name) or called.id.lower() not in _POLICIES:
        raise ValueError(f"{ast.unparse(node)} is no policy: there are {', '.join(_POLICIES)}")
    make: type[Policy] = getattr(policies, _POLICIES[called.id.lower()])
    if not isinstance(node, ast.Call):
        return make()
    names = [f.name for f in fields(make)]
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg not in names:
            close = difflib.get_close_matches(keyword.arg or "", names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"{called.id} has no parameter {keyword.arg!r}: {hint}")
        values[keyword.arg] = _value(keyword.arg, keyword.value)
    if node.args:
        raise ValueError(f"{called.id} takes its parameters by name: {', '.join(names)}")
    return make(**values)


def _value(name: str, node: ast.expr) -> Any:
    if name == "reference" and isinstance(node, ast.Call | ast.Name):
        return _policy(node)
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{name}={ast.unparse(node)} is not a plain value") from None
