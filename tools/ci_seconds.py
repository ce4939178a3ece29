"""Write the seconds of each stage of ``.ci/run``, which it reads as lines of a name and a number, into a JSON file."""

from __future__ import annotations

import subprocess
import sys

from thinwire_tools.results import Results

commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
results = Results(".ci/run", about={"commit": commit})
for line in sys.stdin:
    stage, seconds = line.split()
    results.add(stage, int(seconds), "s")
results.write(sys.argv[1])
