"""The policies of the laboratory: each turns a snapshot, a budget and what it remembers into a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from experiments.policies.baselines import Bayes, ByPriority, Linear
from experiments.policies.candidates import Table
from thinwire.compressors import Compressor, TopK, unwrap
from thinwire.policies import Accordion, KMeans, LGreco
from thinwire.policies.budget import BudgetedPolicy, InfeasibleError

Plan = Mapping[str, Compressor]
Memory = Mapping[str, tuple[float, ...]]
Choose = Callable[[Table, Compressor, Memory], tuple[Plan, Memory]]
"""Of a snapshot, a level of its family (what the rules name) and what the policy noted before, the plan and what it
notes now."""


@dataclass(frozen=True)
class Method:
    """A policy's name and what it chooses. ``sparse``: replayed on one snapshot of each training only, in its middle,
    because a decision takes half a second."""

    name: str
    choose: Choose
    sparse: bool = False


def budgeted(policy: BudgetedPolicy) -> Choose:
    """A policy that stays within the error that uniform compression at the level has."""

    def choose(table: Table, level: Compressor, memory: Memory) -> tuple[Plan, Memory]:
        return within(policy, table, table.uniform(level)), memory

    return choose


def within(policy: BudgetedPolicy, table: Table, reference: Plan) -> Plan:
    """What a policy chooses within the error of ``reference``; that itself where it finds nothing."""
    layers, evidence = table.beside(reference), table.evidence()
    if isinstance(policy, ByPriority):
        price = policy.price(evidence)
        layers = [
            replace(
                layer,
                costs=np.array([price(layer.name, c, evidence.gradients[layer.name].shape) for c in layer.candidates]),
            )
            for layer in layers
        ]
    try:
        picked = policy.choose(evidence, layers)
    except InfeasibleError:
        return reference
    return {layer.name: layer.candidates[k] for layer, k in zip(layers, picked, strict=True)}


def accordion(table: Table, level: Compressor, memory: Memory) -> tuple[Plan, Memory]:
    """The level where a layer's gradient changes fast, and the thesis's stronger compression elsewhere."""
    reference = table.uniform(level)
    asked = {name: compressor for name, compressor in reference.items() if type(compressor) is type(level)}
    proposal = Accordion().propose(replace(table.evidence(memory), reference=asked, present=asked))
    chosen = {name: unwrap(compressor) for name, compressor in proposal.layers.items()}
    return {**reference, **chosen}, proposal.memory


def with_accordion(table: Table, level: Compressor, memory: Memory) -> tuple[Plan, Memory]:
    """L-GreCo within the error that Accordion's choice has (thesis, section 4.6.3)."""
    reference, memory = accordion(table, level, memory)
    return within(LGreco(), table, reference), memory


def globally(table: Table, level: Compressor, memory: Memory) -> tuple[Plan, Memory]:
    """One threshold for all layers, those values that uniform top-k would send as many of: global top-k, and Rethink-GS
    with the threshold that gives this density. Nothing of a layer that has none; one value here, as `TopK` sends."""
    assert isinstance(level, TopK)
    assert isinstance(level.density, float)
    values = {layer.name: table.snapshot.gradients[layer.name].abs().reshape(-1) for layer in table.layers}
    everything = torch.cat(list(values.values()))
    count = max(1, round(level.density * everything.numel()))
    threshold = everything.kthvalue(everything.numel() - count + 1).values
    counts = {name: max(1, int((own >= threshold).sum())) for name, own in values.items()}
    # Densities are rounded up to whole values: half a value less is the same count whatever the rounding.
    return {name: TopK(density=(counts[name] - 0.5) / own.numel()) for name, own in values.items()}, memory


def bayes(table: Table, level: Compressor, memory: Memory) -> tuple[Plan, Memory]:
    """Bayesian optimization with four trials a layer, as its docstring asks for."""
    policy = Bayes(trials=4 * len(table.layers), proposals=256)
    return within(policy, table, table.uniform(level)), memory


METHODS = (
    Method("lgreco", budgeted(LGreco())),
    Method("priority", budgeted(ByPriority())),
    Method("kmeans", budgeted(KMeans())),
    Method("linear", budgeted(Linear())),
    Method("bayes", bayes, sparse=True),
    Method("accordion", accordion),
    Method("both", with_accordion),
    Method("global", globally),
)
