"""From an empty folder to what ``thinwire doctor`` says of a script, as somebody goes who has just heard of it.

Clones this repository into a temporary folder, makes the environment of the README's first command there, and lets
doctor examine a script that knows nothing of thinwire, over an emulated network (over loopback where none can be made).
Prints what each part took; ends with an error if it was ten minutes or more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console

from thinwire_tools import lab
from thinwire_tools.results import Results

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
SCRIPT = ("tests/support/doctor_training.py", "1000000", "0.05", "weights.pt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    options = parser.parse_args()
    console = Console(highlight=False)
    shaped = lab.unavailable() is None
    network = ["--rate", "100mbit", "--rtt", "10ms"] if shaped else []
    # Nothing of the environment that this runs in.
    bare = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")}
    results = Results("make first-answer", about={"limit_s": LIMIT_S, "network": " ".join(network) or "loopback"})
    total, answer = 0.0, ""
    with tempfile.TemporaryDirectory() as folder:
        clone, page = Path(folder, "thinwire"), Path(folder, "report.html")
        asked = ["doctor", "--ranks", "2", *network, "--html", str(page), "--", *SCRIPT]
        parts: dict[str, tuple[list[str], Path]] = {
            "clone": (["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT),
            "environment": (["make", ".venv/demo"], clone),
            "answer": ([str(clone / ".venv/bin/thinwire"), *asked], clone),
        }
        for name, (argv, where) in parts.items():
            with console.status(f"{name} ..."):
                started = time.perf_counter()
                done = subprocess.run(
                    argv, cwd=where, env=bare, text=True, capture_output=True, timeout=1800, check=False
                )
            seconds = time.perf_counter() - started
            if done.returncode:
                console.print(f"{' '.join(argv)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}", markup=False)
                return 1
            total += seconds
            answer = done.stdout
            results.add(f"seconds/{name}", seconds, "s")
            console.print(f"{name}: {seconds:.0f} s")
        console.print(answer.strip(), markup=False)
        assert page.stat().st_size > 10_000, "doctor wrote no page"
    results.add("seconds", total, "s")
    console.print(f"{total:.0f} s in all; {LIMIT_S:.0f} are allowed.")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        results.write(options.json)
    return int(total >= LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
