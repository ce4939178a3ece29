"""Weights and gradients of a sharded model under one budget of error."""

from __future__ import annotations

import math
from dataclasses import replace

from thinwire.plan.sites import SITES
from thinwire.policies.errors import squared_errors
from thinwire.policies.policy import Evidence


def balanced(evidence: Evidence, gathers: float) -> Evidence:
    """Scale evidence so that weights' and gradients' squared errors with the reference's compressors are each 1 in all.

    One budget then serves both (the thesis leaves it open, section 6.2): bytes saved in weights may be spent on
    gradients, and the sum of relative errors stays. ``gathers``: the number of times that weights are sent for each
    reduction. Rank 0 has one shard of each layer, of which a rank sends as many as there are ranks.
    """
    scaled, times = {}, {}
    for site in SITES:
        names = [name for name in evidence.gradients if name.startswith(f"{site}/") and name in evidence.reference]
        errors = sum(squared_errors(evidence.gradients[n], [evidence.reference[n]])[0] for n in names)
        scale = 1 / math.sqrt(errors) if errors > 0 and math.isfinite(errors) else 1.0
        scaled |= {name: evidence.gradients[name] * scale for name in names}
        if site == "weights":
            times |= dict.fromkeys(names, gathers * evidence.num_ranks)
    return replace(evidence, gradients=scaled, times=times)
