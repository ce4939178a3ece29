"""Assignment of ranks to nodes, determined by the ranks themselves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

VARIABLE = "THINWIRE_NODE"
"""Environment variable that names this rank's node, if the identity from the kernel is not the intended one."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGEST_BYTES = 16


def node_identity() -> Tensor:
    """Return 16 bytes that are equal on ranks that can share memory: those of one kernel in the same PID and network
    namespaces.

    The network namespace is included because ranks in different ones reach each other over a link, as on emulated
    hosts.
    """
    parts = [_read(_BOOT_ID) or os.uname().nodename, _namespace("pid"), os.environ.get(VARIABLE) or _namespace("net")]
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=_DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def number_nodes(identities: Sequence[bytes]) -> tuple[int, ...]:
    """Return the number of each rank's node, counted from 0 in the order of first ranks."""
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
