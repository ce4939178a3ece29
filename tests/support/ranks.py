"""Tests that run on every rank, and what they assert of all of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from harness import run_ranks


def on_ranks(num_ranks: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function of ``rank``, which is called on each of so many ranks, or of its parameter ``size``.

    Further parameters are the test's; ``size`` is given where the number is. ``options`` are those of `run_ranks`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function).parameters.values()
        given = {"size": num_ranks} if num_ranks and "size" in {p.name for p in parameters} else {}

        def test(**values: Any) -> None:
            values |= given
            name = function.__module__, function.__qualname__
            run_ranks(_run, num_ranks or values["size"], *name, values, **options)

        test.__name__, test.__qualname__, test.__doc__ = function.__name__, function.__qualname__, function.__doc__
        test.__module__ = function.__module__
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in given]
        test.__signature__ = inspect.Signature(own)  # pyright: ignore[reportFunctionMemberAccess]
        test.on_rank = function  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return decorate


def _run(rank: int, module: str, name: str, values: Mapping[str, Any]) -> None:
    getattr(importlib.import_module(module), name).on_rank(rank, **values)


def alike(a: Any, b: Any) -> bool:
    """Whether two are equal: tensors, also within mappings and sequences, to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def of_ranks(value: Any) -> list[Any]:
    """What each rank has given."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def assert_alike(*values: Any) -> None:
    """All ranks have the same."""
    for rank, theirs in enumerate(of_ranks(values)):
        assert alike(values, theirs), f"rank {rank} has something else"
