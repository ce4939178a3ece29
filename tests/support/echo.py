"""A function for `thinwire_tools.ranks.ForkedProcess`: answers each line with what it finds around it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TextIO


def main(commands: TextIO, answers: TextIO) -> None:
    sys.stderr.write("on standard error\n")
    sys.stderr.flush()
    for line in commands:
        if line == "raise\n":
            raise ValueError("as it was told")
        if line == "sleep\n":
            sys.stderr.write("asleep\n")
            sys.stderr.flush()
            time.sleep(600.0)
        facts = {"line": line, "pid": os.getpid(), "session": os.getsid(0), "net": os.readlink("/proc/self/ns/net")}
        facts |= {"rank": os.environ.get("RANK"), "threads": os.environ["OMP_NUM_THREADS"]}
        answers.write(json.dumps(facts) + "\n")
        answers.flush()
