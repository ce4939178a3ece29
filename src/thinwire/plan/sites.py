"""Names of a sharded model's messages by layer: weights, gradients, and sums across replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from thinwire.compressors import RESIDUAL, Coded, Compressor, Delta, cold_start, rounded_for
from thinwire.plan.contraction import gaussian_lost_share
from thinwire.plan.filters import Filter
from thinwire.plan.plan import Plan, Rules

Site = Literal["weights", "gradients", "across"]
SITES: tuple[Site, ...] = ("weights", "gradients", "across")


def at_site(site: Site, layer: str) -> str:
    """Return the name in a plan of a layer's messages at a site: ``weights/blocks.0.mlp.weight``."""
    return f"{site}/{layer}"


def sharded_plan(shapes: Mapping[str, Sequence[int]], rules: Mapping[Site, Rules], keep: Filter) -> Plan:
    """Return one plan for all sites, of names as `at_site` makes them. Patterns are those of the layers' own names.

    Raises:
        ValueError: a pattern matches no parameter, or a compressor cannot serve its site.
    """
    layers: dict[str, Compressor] = {}
    unsuited: dict[str, str] = {}
    for site, asked in rules.items():
        plan = Plan.build(shapes, asked, keep, names_are="model.named_parameters()")
        for name, compressor in plan.layers.items():
            layers[at_site(site, name)] = for_site(site, name, compressor)
        unsuited |= {at_site(site, name): why for name, why in plan.unsuited.items()}
    return Plan(layers, unsuited=unsuited)


def for_site(site: Site, layer: str, compressor: Compressor) -> Coded | Delta:
    """Return the compressor for a site: weights of few bits are rounded to nearest (`rounded_for`). That of weights may
    be a `Delta`, which sends their change since the last gather.

    Raises:
        ValueError: the site cannot have this compressor.
    """
    about = f"{site} of {layer}: {compressor}"
    changes = compressor if site == "weights" and isinstance(compressor, Delta) else None
    coder = compressor if changes is None else changes.coder
    if not isinstance(coder, Coded) or coder.traits.bounded or not coder.traits.plain_sum:
        raise ValueError(
            f"{about} does not become messages of a fixed size that an owner of shards can add up: "
            "use a quantizer such as minmax, maxabs, qsgd, lattice or levels"
        )
    if site == "gradients" and any(slot.shape is None and slot.name != RESIDUAL.name for slot in coder.slots):
        raise ValueError(
            f"{about} keeps a momentum of every element, and an owner adds its own gradients as they are: "
            "use ef(topk(...))"
        )
    # The next change contains what this one leaves out.
    whole = site == "weights" and changes is None
    if whole and (coder.traits.wants_feedback or any(slot.shape is None for slot in coder.slots)):
        raise ValueError(
            f"{about} leaves out too much of the weights, or sends it later: weights must arrive in every step"
        )
    if site == "across" and any(slot != RESIDUAL for slot in coder.slots):
        raise ValueError(
            f"{about} learns, for which means over replicas have no room: give across='minmax(bits=4, bucket=128)'"
        )
    if (
        any(slot.shape is not None and not (slot.learned or slot.optional) for slot in coder.slots)
        or cold_start(coder) is not None
    ):
        raise ValueError(f"{about} needs whole layers, and ranks have shards: use a quantizer")
    if changes is not None:
        lost = gaussian_lost_share(coder)
        if lost >= 1.0:
            raise ValueError(
                f"{about} loses {lost:.2f} of the norm of a Gaussian change: what ranks keep would move away from the "
                "weights. Take more bits, or share a scale among fewer values (bucket=)"
            )
        return changes
    return rounded_for("weights", coder) if whole else coder
