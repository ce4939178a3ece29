"""Reading the losses of a user's training: from its output, from a JSON log, from TensorBoard's files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire_tools.exits import CommandError

PATTERN = r"loss[^\w+.-]{0,5}([-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
"""Pattern of ``loss 0.25``, ``loss: 2.5e-1`` and ``'loss': 0.25`` in a line, whatever its case."""


class NoLosses(CommandError):
    """A training left no losses where they were looked for; the message says what to give instead."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile the pattern for `loss_in`.

    Raises:
        ValueError: it is no regular expression, or has not exactly one group.
    """
    try:
        compiled_pattern = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"--pattern {pattern!r} is no regular expression: {error}") from None
    if compiled_pattern.groups != 1:
        raise ValueError(f"--pattern {pattern!r} needs one group around the number: 'val loss ([0-9.]+)'")
    return compiled_pattern


def loss_in(line: str, pattern: re.Pattern[str]) -> float | None:
    """Return the last loss in a line; None if there is none."""
    matches = pattern.findall(line)
    try:
        return float(matches[-1]) if matches else None
    except ValueError:
        raise NoLosses(f"--pattern {pattern.pattern!r} finds {matches[-1]!r} in {line.strip()!r}: no number") from None


def read_log(path: Path, key: str) -> list[float]:
    """Return the values of ``key`` in a log, in order.

    ``path`` is a JSON Lines file, a JSON file with a list of objects (as transformers' ``trainer_state.json``), or a
    folder of TensorBoard's.

    Raises:
        NoLosses: there is no such file or folder, or none of its records has the key.
    """
    if not path.exists():
        raise NoLosses(
            f"the training wrote no {path}: '{{out}}' stands for each run's own folder, in --log and its command"
        )
    if path.is_dir():
        return _tensorboard(path, key)
    records = list(_records(path))
    values = [float(record[key]) for record in records if isinstance(record.get(key), int | float)]
    if not values:
        keys = ", ".join(sorted({name for record in records for name in record}))
        raise NoLosses(
            f"no record of {path} has a number {key!r}: name one with --key; there are {keys or 'no records'}"
        )
    return values


def _records(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text()
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = []
        for line in text.splitlines():
            try:
                content.append(json.loads(line))
            except json.JSONDecodeError:
                # It is the last line of a training that was killed, or a line of text between records.
                continue
    lists = (
        [content] if isinstance(content, list) else [v for v in content.values() if isinstance(v, list)] or [[content]]
    )
    for each in lists:
        yield from (record for record in each if isinstance(record, dict))


def _tensorboard(folder: Path, key: str) -> list[float]:
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        raise ImportError("reading TensorBoard's files requires tensorboard: pip install tensorboard") from error
    tags: set[str] = set()
    for inner in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        log = event_accumulator.EventAccumulator(str(inner), size_guidance={"scalars": 0})
        log.Reload()
        tags |= set(log.Tags()["scalars"])
        if key in tags:
            return [float(event.value) for event in log.Scalars(key)]
    raise NoLosses(
        f"{folder} has no scalar {key!r}: name one with --key; there are {', '.join(sorted(tags)) or 'none'}"
    )


def final(losses: list[float]) -> float:
    """Return the loss that a training ended at: the mean of the last tenth of its losses, and of one at least."""
    last = losses[-max(1, len(losses) // 10) :]
    return math.fsum(last) / len(last)
