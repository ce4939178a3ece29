"""``python -m experiments fuzz``: very many damaged messages are decoded, in memory that reports every stray access.

The tests do the same with hypothesis, which finds the smallest message that fails and needs a millisecond for each.
Here damage is made for thousands of messages at a time. ``make fuzz-sanitized`` runs it on a core that was built with
the address and undefined-behavior sanitizers: they end the process at the first access outside a tensor.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.collectives import PeerFailedError
from thinwire.collectives.message import HEADER_BYTES, seal, verify
from thinwire.compressors import GRADIENT_DTYPES, CodecCall, Coded, Piece, Segments, parse
from thinwire.kernels import native
from thinwire.testing.laws import encode_one
from thinwire_tools.results import OutputFile, Results

SPECS = (
    *("raw", "minmax(bits=1, bucket=64)", "minmax(bits=3, bucket=128)", "minmax(bits=4)", "minmax(bits=8, bucket=1)"),
    *("qsgd(bits=4, bucket=128)", "qsgd(bits=4, bucket=layer, levels=64)", "maxabs(bits=2)", "maxabs(bits=4)"),
    *("maxabs(bits=4, scale=layer)", "maxabs(bits=8)", "terngrad", "natural", "onebit(bucket=512)", "sign"),
    *("sign(majority=True)", "lattice(bits=3, bucket=64)", "levels(bits=4, bucket=1024, min_numel=0)"),
    *("rangefloat(bits=10)", "rangefloat(bits=6, rounding=truncate)", "gaussian(bits=2)"),
    *("topk(density=0.1)", "topk(density=1.0)", "threshold(lam=1.0, capacity=0.5)", "globaltopk(density=0.05)"),
    *("topk(density=0.1) | minmax(bits=8)", "threshold(lam=1.0, capacity=0.5) | natural", "fft(theta=0.85)"),
    *("fft(theta=0.9, bits=8, block=100, cast=True)", "ef(topk(density=0.1))", "dgc(topk(density=0.05))"),
    *("direct(maxabs(bits=3))", "chunktopk(k=3, chunk=100)", "chunktopk(k=64, average=senders)"),
)
_NUMELS = (1, 63, 64, 129, 700)
_RUNS = ("set", "add", "mean", "add up")
_BEFORE = 64
"""Elements before a decoded segment that must stay as they are."""
_BATCH = 4000
_PYTHON, _TRANSFORMS = ("topk", "threshold", "gaussian", "direct", "raw"), ("fft",)
"""Parts of specs of which a message takes ten times as long as others, or a hundred times: they have fewer."""
_HOSTILE = np.array(
    [0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x7FC00000, 0x7F800000, 0xFF7FFFFF], dtype=np.uint32
)
"""Words at which counts, indices and floats go wrong."""
Rows = NDArray[np.uint8]


class Target(NamedTuple):
    """What is given damaged messages."""

    whole: Rows
    """A message without damage."""
    take: Callable[[Tensor], object]
    check: Callable[[], None]
    """Raises ``AssertionError`` if taking messages has changed what is none of theirs."""


@dataclass
class Tally:
    """What became of damaged messages."""

    inputs: int = 0
    decoded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By the type of the error."""


def damaged(whole: Rows, count: int, random: np.random.Generator) -> Rows:
    """``count`` copies of a message: one in four of random bytes, of the others bits flipped or words replaced, and of
    each half the damage is at the front, where counts and flags stand."""
    rows = np.tile(whole, (count, 1))
    noise = count // 4
    rows[:noise] = random.integers(0, 256, (noise, whole.size), dtype=np.uint8)
    words = rows[:, : whole.size // 4 * 4].view(np.uint32)
    for many, (first, last) in enumerate(itertools.pairwise((noise, noise * 2, noise * 3, count))):
        chosen = np.arange(first, last)
        size = np.where(chosen & 1, min(whole.size, 64), whole.size)
        for _ in range(1 + 2 * (many % 2) + many):
            places = random.integers(0, size)
            if many < 2:
                rows[chosen, places] ^= np.uint8(1) << random.integers(0, 8, chosen.size, dtype=np.uint8)
            elif words.size:
                words[chosen, np.minimum(places // 4, words.shape[1] - 1)] = random.choice(_HOSTILE, chosen.size)
    return rows


def decoding(spec: str, numel: int, dtype: torch.dtype, run: str) -> Target:
    """A message of a compressor, and what decodes one of its size, or shorter.

    Tensors have exactly the size that they need: the sanitizer guards what lies beside them.
    """
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole, _ = encode_one(compressor, x)
    call = CodecCall(Segments.build([Piece("layer", _BEFORE, numel, 0, 0)]), scale=0.5)
    y = torch.full((_BEFORE + numel,), 7.0, dtype=dtype)
    total = torch.full((_BEFORE + numel,), 7.0)

    def decode(message: Tensor) -> None:
        if run == "mean":
            compressor.mean([message, message], y, call)
        elif run == "add up":
            compressor.add_up([message, message], y, total, call)
        else:
            compressor.decode(message, y, call, add=run == "add")

    def check() -> None:
        if not bool((y[:_BEFORE] == 7.0).all() & (total[:_BEFORE] == 7.0).all()):
            raise AssertionError(f"{spec} wrote before its segment")

    return Target(whole.numpy(), decode, check)


_FRAME = {"source": 1, "phase": 2, "step": 77, "digest": 2**63 + 5}


def verifying() -> Target:
    """A sealed message, and what checks one."""
    message = torch.zeros(HEADER_BYTES + 64, dtype=torch.uint8)
    seal(message, **_FRAME, failed=False, divided=False)
    return Target(message.numpy(), lambda data: verify(data, peer=1, **_FRAME), lambda: None)


def attack(target: Target, count: int, random: np.random.Generator, tally: Tally) -> None:
    """Give it so many damaged messages; it may raise what is promised, with words, and nothing else."""
    whole, take, check = target
    message = torch.empty(whole.size, dtype=torch.uint8)
    into = message.numpy()
    for number, row in enumerate(damaged(whole, count, random)):
        if number % 16:
            into[:] = row
            given = message
        else:
            # Cut off, or longer than it should be.
            size = int(random.integers(0, whole.size + 33))
            given = torch.zeros(size, dtype=torch.uint8)
            given[: whole.size] = torch.from_numpy(row)[:size]
        tally.inputs += 1
        try:
            take(given)
            tally.decoded += 1
        except (ValueError, PeerFailedError) as error:
            if not str(error):
                raise AssertionError("an error without a word") from error
            tally.refused[type(error).__name__] += 1
    check()


def fuzz(*, inputs: int = 1_000_000, seed: int = 0, json: OutputFile = None) -> int:
    """Decode very many damaged messages: decoders stay inside their tensors, and the worst is an error that says why.

    Examples:
      python -m experiments fuzz --inputs 100000
      make fuzz-sanitized

    Args:
        inputs: number of damaged messages.
        seed: what they are drawn from.
        json: write the figures to this file.
    """
    torch.set_num_threads(1)
    random = np.random.default_rng(seed)
    tallies: dict[str, Tally] = {}
    started, spent = time.monotonic(), time.process_time()
    console = Console(highlight=False)
    done, last = 0, started
    while done < inputs:
        count = min(_BATCH, inputs - done)
        if random.integers(0, 32) == 0:
            name, target = "sealed frames", verifying()
        else:
            name = str(random.choice(SPECS))
            dtype = GRADIENT_DTYPES[random.integers(0, len(GRADIENT_DTYPES))]
            target = decoding(name, int(random.choice(_NUMELS)), dtype, str(random.choice(_RUNS)))
            slower = 10 * any(part in name for part in _PYTHON) + 100 * any(part in name for part in _TRANSFORMS)
            count = min(count, _BATCH // max(1, slower))
        attack(target, count, random, tallies.setdefault(name, Tally()))
        done += count
        if time.monotonic() - last > 60.0:
            last = time.monotonic()
            console.print(f"{done} inputs after {last - started:.0f} s")
            if json:
                # So that a run that is stopped has the figures of what it did.
                _results(tallies, seed, time.process_time() - spent).write(json)
    table = Table("message", "inputs", "decoded", "refused")
    for name, tally in sorted(tallies.items()):
        table.add_row(name, str(tally.inputs), str(tally.decoded), str(tally.refused.total()))
    console.print(table)
    if json:
        _results(tallies, seed, time.process_time() - spent).write(json)
    return 0


def _results(tallies: dict[str, Tally], seed: int, processor_s: float) -> Results:
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    about = {"seed": seed, "level": native.cpu_level(), "sanitized": sanitized}
    results = Results("python -m experiments fuzz", about=about)
    results.add("inputs", sum(tally.inputs for tally in tallies.values()), "")
    results.add("decoded", sum(tally.decoded for tally in tallies.values()), "")
    for error in sorted({error for tally in tallies.values() for error in tally.refused}):
        results.add(f"refused/{error}", sum(tally.refused[error] for tally in tallies.values()), "")
    results.add("processor_time", round(processor_s, 1), "s")
    for name, tally in sorted(tallies.items()):
        results.add(f"inputs/{name}", tally.inputs, "", decoded=tally.decoded, refused=dict(tally.refused))
    return results
