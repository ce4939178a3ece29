"""One rank of a user's script in a comparison: seeded, with compression or as it is."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from thinwire_tools.compare.variants import Variant
from thinwire_tools.run.attachment import Attachment, Misused
from thinwire_tools.run.script import run_script


@dataclass(frozen=True)
class Setup:
    """Instructions for a rank.

    Args:
        script: arguments for python.
        seed: seed of the global generators, for scripts that do not set them themselves.
        variant: text for `Variant.parse`; None for the script as it is.
        stats: file that rank 0 writes the bytes sent to, where there is a variant.
    """

    script: tuple[str, ...]
    seed: int
    variant: str | None
    stats: str

    def argv(self) -> list[str]:
        """Return the command of such a rank."""
        return [sys.executable, "-u", "-m", "thinwire_tools.compare.script_rank", json.dumps(asdict(self))]


def main(text: str) -> int:
    setup = Setup(**json.loads(text))
    random.seed(setup.seed)
    np.random.seed(setup.seed % 2**32)
    torch.manual_seed(setup.seed)
    if setup.variant is None:
        run_script(setup.script)
        return 0
    variant = Variant.parse(setup.variant)
    options = {"seed": setup.seed, "skip_if_slower": False}
    if variant.policy is not None:
        options["adapt"] = variant.policy
    attached = Attachment(variant.spec, options, None, 1)
    try:
        with attached:
            run_script(setup.script)
    except Misused as error:
        sys.stderr.write(f"{error}\n")
        return 64
    finally:
        if attached.wire is not None and attached.wire.rank == 0:
            stats = attached.wire.stats
            counts = {"sent": stats.payload_sent_bytes, "dense": stats.dense_bytes, "steps": stats.steps}
            Path(setup.stats).write_text(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
