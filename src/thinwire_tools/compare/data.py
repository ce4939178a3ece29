"""Text that every machine with Python already has: the standard library's own source, as bytes.

Nothing is downloaded. The order of the files is fixed, and the split into training and held-out text is by top-level
module or package (never inside one), so that no held-out byte has a sibling file in the training text.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_HELD_OUT_SHARE = 0.1
# Not prose of the library: foreign packages, test suites, and tables that were written by programs.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
_LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class Text:
    """A corpus as tokens: one byte is one token (``uint8``, vocabulary 256)."""

    train: Tensor
    held_out: Tensor
    num_files: int
    digest: str
    """SHA-256 over all tokens, by which two runs can be checked to have seen the same text."""


def standard_library(root: Path | None = None) -> Text:
    """Return the source of this interpreter's standard library (``root``: another folder of ``.py`` files).

    Raises ``RuntimeError`` if the folder has less than 1 MB of source (some distributions ship only bytecode).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    seen: set[bytes] = set()
    for relative in sorted(_python_files(root)):
        source = (root / relative).read_bytes()
        content = hashlib.sha256(source).digest()
        if source and content not in seen:
            seen.add(content)
            parts[_is_held_out(relative.partition("/")[0])].append(source)
    train, held_out = b"\n".join(parts[False]), b"\n".join(parts[True])
    if min(len(train), 10 * len(held_out)) < _LEAST_BYTES:
        raise RuntimeError(
            f"{root} holds too little Python source ({len(train)} bytes to train on, {len(held_out)} held out): "
            "use a Python that ships its standard library as .py files (python.org, pyenv, uv, conda)"
        )
    digest = hashlib.sha256(train + held_out).hexdigest()
    return Text(_tokens(train), _tokens(held_out), len(seen), digest)


def _python_files(root: Path) -> Iterator[str]:
    """Yield files relative to ``root``; folders that are left out are not even entered."""
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]
        at = Path(folder).relative_to(root)
        yield from ((at / name).as_posix() for name in names if name.endswith(".py"))


def _is_held_out(unit: str) -> bool:
    """Whether a top-level module or package is held out: by its name alone, so that all machines agree."""
    draw = int.from_bytes(hashlib.sha256(unit.removesuffix(".py").encode()).digest()[:4], "big")
    return draw < _HELD_OUT_SHARE * 2**32


def _tokens(source: bytes) -> Tensor:
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def draw_offsets(num_tokens: int, *, steps: int, num_ranks: int, batch: int, context: int, seed: int) -> Tensor:
    """Return where each training window starts: ``int64 [steps, num_ranks, batch]``, a function of the arguments alone.

    Every variant of a comparison draws the same windows; every rank takes its own column.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        num_tokens - context, (steps, num_ranks, batch), generator=generator, dtype=torch.int64, device="cpu"
    )


def windows(tokens: Tensor, offsets: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (the next byte) of windows from ``offsets`` on: two ``int64 [batch, context]``."""
    picked = tokens[offsets.unsqueeze(1) + torch.arange(context + 1, dtype=torch.int64, device="cpu")].long()
    return picked[:, :-1], picked[:, 1:]


def even_offsets(num_tokens: int, *, count: int, context: int) -> Tensor:
    """Return ``count`` window starts spread evenly over a text, without overlap: ``int64 [count]``.

    Raises ``ValueError`` if the text is too short for that.
    """
    stride = (num_tokens - 1) // count
    if stride < context:
        raise ValueError(f"{num_tokens} tokens do not hold {count} windows of {context} without overlap")
    return torch.arange(count, dtype=torch.int64, device="cpu") * stride
