"""Results of commands: the one JSON shape that each writes with ``--json``, and tables of figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.table import Table
from tyro.constructors import PrimitiveConstructorSpec


def check_output_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that can be written.

    Raises:
        ValueError: the file cannot be written, so that a run would end without its figures.
    """
    commit()  # of what is about to run: another one may be checked out at its end
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"{file} cannot be written: there is no folder {file.parent}")
    if file.exists():
        if not os.access(file, os.W_OK):
            raise ValueError(f"{file} cannot be written: permission denied")
        return file
    target = os.path.realpath(file)  # the file that a link leads to, which may not exist yet: the link stays
    try:
        with open(target, "x"):  # a folder that may be written need not take files: /proc does not
            pass
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from None
    os.unlink(target)
    return file


OutputFile = Annotated[
    Path | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda args: check_output_file(args[0]),
        is_instance=lambda value: value is None or isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""Option of a command for a file to write: a path that cannot be written is refused before the run."""


def machine() -> dict[str, Any]:
    """Return CPU model, cores, memory and kernel of this machine: a figure means nothing without them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": pages * page_bytes,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for name in ("thinwire", "torch"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


@cache
def commit() -> str | None:
    """Return the commit of the clone that runs, with ``-dirty`` where its files differ from it; None outside of one."""
    clone = Path(__file__).parents[2]
    if not (clone / ".git").exists():
        return None
    git = ["git", "-C", str(clone), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass
class Results:
    """Figures of one command: ``{"command", "commit", "versions", "machine", "results": [{"name", "value", …}]}``."""

    command: str
    results: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, **more: Any) -> None:
        """Record one figure; ``more`` are the conditions that it depends on (rate, bits, runs …)."""
        self.results.append({"name": name, "value": value, "unit": unit, **more})

    def value(self, name: str) -> float:
        for row in self.results:
            if row["name"] == name:
                return row["value"]
        raise KeyError(f"no result named {name!r}; there are {[row['name'] for row in self.results]}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            **({"about": self.about} if self.about else {}),
            "results": self.results,
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        write_record(self.to_dict(), path)


def write_record(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what `Results.to_dict` returned to ``path`` as JSON."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def figures_table(label: str, figures: Sequence[str]) -> Table:
    """Return an empty table: a column of labels, which wrap on a narrow terminal, and columns of figures, which do not.

    A line break in a heading makes its column narrower.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(label, overflow="fold", vertical="bottom")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
