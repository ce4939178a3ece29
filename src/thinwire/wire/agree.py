"""Ranks agree before they speak: a difference is an error that names ranks and the first difference, on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from thinwire.collectives import Transport

_MAX_RECORD_BYTES = 64 << 20


class DisagreementError(RuntimeError):
    """Ranks were given different plans, seeds or versions."""


def library_version() -> str:
    try:
        return version("thinwire")
    except PackageNotFoundError:
        return "not installed"


def agree(record: Mapping[str, str], transport: Transport) -> None:
    """Check that all ranks hold the same record.

    Only fixed-size tensors are exchanged unless there is a difference; nothing received is unpickled.

    Raises:
        DisagreementError: on every rank alike, naming the ranks that differ from rank 0 and the first difference.
    """
    mine = "\n".join(f"{key}: {value}" for key, value in record.items()).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine).digest()), dtype=torch.uint8)
    digests = transport.all_gather(digest)
    if bool((digests == digests[0]).all()):
        return
    texts = exchange_texts(mine, transport)
    first = texts[0].splitlines()
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        others = [str(r) for r, t in enumerate(texts) if t == text]
        lines = text.splitlines()
        length = max(len(first), len(lines))
        pairs = zip(_padded(first, length), _padded(lines, length), strict=True)
        at_first, here = next(pair for pair in pairs if pair[0] != pair[1])
        raise DisagreementError(
            f"ranks do not agree: rank 0 has '{_short(at_first)}', rank {rank} has '{_short(here)}' "
            f"(ranks that differ from rank 0 like this: {', '.join(others)}). "
            "Give every rank the same arguments, model and thinwire version"
        )


def _padded(lines: list[str], length: int) -> list[str]:
    return lines + ["(nothing)"] * (length - len(lines))


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:200] + "..."


def exchange_texts(mine: bytes, transport: Transport) -> list[str]:
    """The texts of all ranks, by rank. A native collective: all ranks must call it, and nothing else at the time."""
    sizes = transport.all_gather(torch.tensor([len(mine)]))[:, 0].tolist()
    size = max(sizes)
    if not 0 <= size <= _MAX_RECORD_BYTES:
        raise DisagreementError(f"ranks do not agree, and a rank announced a record of {size} bytes")
    padded = torch.frombuffer(bytearray(mine.ljust(size, b"\n")), dtype=torch.uint8)
    return [bytes(row.tolist()).decode(errors="replace").rstrip("\n") for row in transport.all_gather(padded)]
