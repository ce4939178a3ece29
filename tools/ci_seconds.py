"""Write the seconds of each stage of ``.ci/run``, which it reads as lines of a name and a number, into a JSON file."""

from __future__ import annotations

import sys

from thinwire_tools.results import Results

results = Results(".ci/run")
for line in sys.stdin:
    stage, seconds = line.split()
    results.add(stage, int(seconds), "s")
results.write(sys.argv[1])
