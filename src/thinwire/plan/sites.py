"""Names of what a sharded model sends of its layers: weights, gradients, and sums across replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from thinwire.compressors import Coded, Compressor
from thinwire.plan.errors import squared_errors
from thinwire.plan.filters import Filter
from thinwire.plan.plan import Plan, Rules
from thinwire.plan.policy import Evidence

Site = Literal["weights", "gradients", "across"]
SITES: tuple[Site, ...] = ("weights", "gradients", "across")


def at_site(site: Site, layer: str) -> str:
    """The name in a plan of what is sent of a layer: ``weights/blocks.0.mlp.weight``."""
    return f"{site}/{layer}"


def sharded_plan(shapes: Mapping[str, Sequence[int]], rules: Mapping[Site, Rules], keep: Filter) -> Plan:
    """One plan for all sites, of names as `at_site` makes them. Patterns are those of the layers' own names.

    Raises:
        ValueError: a pattern matches no parameter, or a compressor cannot serve its site.
    """
    layers: dict[str, Compressor] = {}
    unsuited: dict[str, str] = {}
    for site, asked in rules.items():
        plan = Plan.build(shapes, asked, keep)
        for name, compressor in plan.layers.items():
            check_site(site, name, compressor)
            layers[at_site(site, name)] = compressor
        unsuited |= {at_site(site, name): why for name, why in plan.unsuited.items()}
    return Plan(layers, unsuited=unsuited)


def check_site(site: Site, layer: str, compressor: Compressor) -> None:
    """Raise ``ValueError`` if what is sent of a layer cannot travel like this."""
    about = f"{site} of {layer}: {compressor}"
    if not isinstance(compressor, Coded) or compressor.size != "fixed" or not compressor.plain_sum:
        raise ValueError(
            f"{about} does not become messages of a fixed size that an owner of shards can add up: "
            "use a quantiser such as minmax, maxabs, qsgd, lattice or levels"
        )
    if site == "weights" and (compressor.wants_feedback or any(slot.shape is None for slot in compressor.slots)):
        raise ValueError(
            f"{about} leaves out too much of the weights, or owes it to a later step: weights must arrive in every step"
        )
    if site == "across" and compressor.slots:
        raise ValueError(f"{about} keeps state, which sums across replicas have no room for: use one without")
    if any(slot.shape is not None and not slot.learned for slot in compressor.slots) or compressor.opening is not None:
        raise ValueError(f"{about} needs whole layers, and ranks have shards: use a quantiser")


def balanced(evidence: Evidence, gathers: float) -> Evidence:
    """Evidence in which weights and gradients err alike with the reference's compressors: by 1 in all, squared.

    So one budget serves both (the thesis leaves it open, section 6.2): what weights gain in bytes may be paid for by
    gradients, and the sum of relative errors stays. ``gathers``: how often weights are sent for each reduction; those
    that rank 0 has are but one shard of each layer, of which a rank sends as often as there are others.
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
