"""The plan: the compressor of each layer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from thinwire.compressors import (
    Coded,
    Compressor,
    Raw,
    Summed,
    UnsuitedError,
    Wrapper,
    at_step,
    cold_start,
    ef,
    for_world,
    parse,
)
from thinwire.plan.filters import Filter, check_order, check_pattern, matches

Rules = str | Compressor | Mapping[str, str | Compressor]
"""One compressor for all layers, or compressors by name pattern: the first pattern that matches counts."""

DEFAULT_RULES = "minmax(bits=4, bucket=128)"
"""Rules that need no tuning in the thesis (section 3.5.3): 4 bits in buckets of 128."""


@dataclass(frozen=True)
class Plan:
    """``{parameter name: Compressor}``. Plans change only between steps; all ranks agree on one before it is used."""

    layers: Mapping[str, Compressor]
    rules: Mapping[str, Compressor] = field(default_factory=dict)
    """Patterns and compressors that the plan was built from."""
    keep: Filter = field(default_factory=Filter)
    unsuited: Mapping[str, str] = field(default_factory=dict)
    """Reasons for layers that are raw because the rules' compressor, or any, cannot take them."""

    @staticmethod
    def build(
        shapes: Mapping[str, Sequence[int]],
        rules: Rules = DEFAULT_RULES,
        keep: Filter | None = None,
        *,
        names_are: str = "the module inside DDP, without 'module.'",
    ) -> Plan:
        """Give each layer of ``shapes`` (parameter name to shape) the compressor that the rules name for it.

        A full name means that layer alone, in the rules as in what ``keep`` excludes; it precedes any pattern.
        Layers that ``keep`` filters, and layers that no rule matches, are raw; a compressor that takes every layer
        gets those that are filtered for their size or dimensions, too. A rule that gives a parameter's full
        name applies even to a layer that would be filtered for its size or dimensions. A compressor that drops or
        distorts much gets error feedback around it, unless it has ``feedback=False``; one that cannot take a layer of
        this shape leaves it raw (`unsuited`), as does any where ``keep`` says that none can.

        ``names_are`` describes the names in the message about a pattern that matches no parameter.

        Raises:
            ValueError: a pattern matches no parameter, or an earlier one all of its parameters, or a spec is wrong.
            TypeError: a compressor was asked for by a layer's full name, and ``keep`` says that none can take it.
        """
        keep = keep or Filter()
        keep = replace(keep, names={**{name: name for name in shapes}, **keep.names})
        if isinstance(rules, str | Compressor):
            rules = {"*": rules}
        parsed = {pattern: parse(spec) for pattern, spec in rules.items()}
        if shapes:
            # A layer that is named in full and excluded may be frozen, and be trained later.
            for pattern in (*parsed, *(word for word in keep.exclude if word not in keep.names)):
                check_pattern(pattern, shapes, keep.names, names_are)
            check_order(list(parsed), shapes, keep.names)
        plan = Plan({}, parsed, keep)
        for name, shape in shapes.items():
            plan = plan.extended(name, shape)
        return plan

    def named(self, name: str, shape: Sequence[int]) -> Compressor:
        """Return the compressor that the rules name for a layer, whatever its shape; raw if it is filtered."""
        own = self._own(name)
        if own is not None:
            return own
        asked = next((c for pattern, c in self.rules.items() if matches(pattern, name, self.keep.names)), Raw())
        every = asked.traits.takes_every_layer
        keeps_raw = self.keep.excludes(name) if every else self.keep.keeps_raw(name, shape)
        return Raw() if keeps_raw else asked

    def _own(self, name: str) -> Compressor | None:
        """Return the compressor of the rule that gives a layer's full name, if one does."""
        names = self.keep.names
        return next((c for rule, c in self.rules.items() if rule == name or names.get(rule) == name), None)

    def extended(self, name: str, shape: Sequence[int]) -> Plan:
        """Return this plan with one more layer."""
        asked = self.named(name, shape)
        unfit = self.keep.unfit.get(name) if not isinstance(asked, Raw) else None
        if unfit is not None and self._own(name) is not None:
            raise TypeError(f"{name}: {unfit}; take its name out of the rules: a pattern such as '*' leaves it raw")
        try:
            if unfit is not None:
                raise UnsuitedError(unfit)
            chosen = asked.fit(shape)
        except UnsuitedError as why:
            return replace(self, layers={**self.layers, name: Raw()}, unsuited={**self.unsuited, name: str(why)})
        if chosen.traits.wants_feedback:
            chosen = ef(chosen)
        return replace(self, layers={**self.layers, name: chosen})

    def with_feedback(self, site: str = "") -> Plan:
        """Return this plan with error feedback around all that is coded, for layers whose name begins with ``site``."""
        fed = {
            name: ef(c) if name.startswith(site) and isinstance(c, Coded) and not isinstance(c, Raw | Wrapper) else c
            for name, c in self.layers.items()
        }
        return replace(self, layers=fed)

    def at_step(self, step: int, learning_rate: float | None) -> Plan:
        """Return this plan in a step, counted from the first compressed one; itself where nothing has a schedule."""
        layers = {name: at_step(compressor, step, learning_rate) for name, compressor in self.layers.items()}
        if all(layers[name] is compressor for name, compressor in self.layers.items()):
            return self
        return replace(self, layers=layers)

    def for_world(self, num_ranks: int, shapes: Mapping[str, Sequence[int]]) -> Plan:
        """Return this plan in a world of so many ranks, with layers of these shapes; itself where none matters.

        Raises:
            ValueError: a compressor cannot serve so many ranks.
        """
        numels: dict[Compressor, int] = {}
        for name, compressor in self.layers.items():
            numels[compressor] = numels.get(compressor, 0) + math.prod(shapes[name])
        placed = {compressor: for_world(compressor, num_ranks, numel) for compressor, numel in numels.items()}
        if all(placed[compressor] is compressor for compressor in placed):
            return self
        return replace(self, layers={name: placed[compressor] for name, compressor in self.layers.items()})

    def with_cold_starts(self, begun: Collection[str]) -> Plan:
        """Return this plan in which layers that have not begun have their compressor for a cold start, if any."""
        cold_starts = {name: cold_start(c) for name, c in self.layers.items() if name not in begun}
        return self.changed({name: c for name, c in cold_starts.items() if c is not None})

    def changed(self, layers: Mapping[str, Compressor]) -> Plan:
        """Return this plan with other compressors for some layers; itself if there are none."""
        return replace(self, layers={**self.layers, **layers}) if layers else self

    def __getitem__(self, name: str) -> Compressor:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def has_slots(self) -> bool:
        """Whether any compressor keeps state."""
        return any(compressor.slots for compressor in self.layers.values())

    @cached_property
    def needs_loss_scale(self) -> bool:
        """Whether any compressor must know by how much gradients are scaled."""
        return self.has_slots or any(compressor.traits.absolute for compressor in self.layers.values())

    @property
    def sums(self) -> bool:
        """Whether native all-reduces add what any compressor sends."""
        return any(isinstance(compressor, Summed) for compressor in self.layers.values())

    @cached_property
    def all_raw(self) -> bool:
        return all(isinstance(compressor, Raw) for compressor in self.layers.values())

    def __str__(self) -> str:
        """Return one line for each layer: its name and its compressor."""
        width = max(map(len, self.layers), default=0)
        return "\n".join(f"{name:{width}}  {compressor}" for name, compressor in self.layers.items())

    def to_dict(self) -> dict[str, str]:
        """Return names and specs, in the order of the layers: plain JSON, and rules that `thinwire.compress` takes."""
        return {name: str(compressor) for name, compressor in self.layers.items()}

    @staticmethod
    def from_dict(specs: Any) -> Plan:
        """Return the plan of a dictionary that `to_dict` returned.

        Raises:
            ValueError: it is not a dictionary of names and specs.
        """
        if not isinstance(specs, dict) or not all(isinstance(part, str) for item in specs.items() for part in item):
            raise ValueError("a plan is a JSON object of parameter names and specs")
        try:
            return Plan({name: parse(spec) for name, spec in specs.items()})
        except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"the plan has an invalid compressor: {error}") from None

    def to_json(self) -> str:
        """Return `to_dict` as text."""
        return json.dumps(self.to_dict())

    def with_json(self, text: str) -> Plan:
        """Return this plan with the layers of a text that `to_json` returned.

        Raises:
            ValueError: the text is not a JSON object of specs.
        """
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("a plan is a JSON object of parameter names and specs, not so deeply nested") from None
        return replace(self, layers=Plan.from_dict(content).layers)

    @property
    def hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of names and specs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def summary(self) -> str:
        """Return one line: how many layers each compressor has."""
        counts: dict[str, int] = {}
        for compressor in self.layers.values():
            counts[str(compressor)] = counts.get(str(compressor), 0) + 1
        return ", ".join(f"{count} x {spec}" for spec, count in sorted(counts.items()))
