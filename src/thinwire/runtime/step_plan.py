"""The compressors of one step: those of a plan, changed by schedules, cold starts and layers that train only now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from thinwire.compressors import (
    Coded,
    Compressor,
    Raw,
    RawSum,
    Scheduled,
    Summed,
    Wrapper,
    at_step,
    cold_start,
    learns_at,
)
from thinwire.plan import Plan
from thinwire.runtime.slots import Slots


class StepPlan:
    """The plan as it is in the present step. Slots stay with their layers; messages change their sizes."""

    def __init__(self, num_ranks: int, shapes: Mapping[str, Sequence[int]], slots: Slots) -> None:
        self._num_ranks, self._shapes, self._slots = num_ranks, shapes, slots
        self._known: dict[str, int] = {}
        self._begun: set[str] = set()
        self._learned: set[str] = set()
        self._followed: Plan | None = None
        self._scheduled: list[Compressor] = []
        self._in_step: list[Compressor] | None = None
        self._awaits_begin = False
        self._present = Plan({})
        self._raw_is_summed = False
        self.steady: Plan | None = None
        """Plan that has one form in all steps, in none of which a layer learns; None if the present one may change."""
        self.number = 0
        """Number of the present form among those seen so far."""
        self._learns_at: dict[str, tuple[int, ...]] = {}
        """Steps in which each layer learns."""

    def forget(self) -> None:
        """Start over, from another plan and with other slots."""
        self._known.clear()
        self._begun.clear()
        self._followed = self.steady = None

    def follow(self, plan: Plan, step: int, learning_rate: float | None) -> None:
        """Take the form of ``step``, counted from the first compressed one."""
        # A few compressors serve all layers, and most of them have no schedule: then nothing is done for each layer.
        if plan is not self._followed:
            self._followed, self._in_step = plan, None
            self._scheduled = [c for c in dict.fromkeys(plan.layers.values()) if isinstance(c, Scheduled | Wrapper)]
            self._learned.clear()
        in_step = [at_step(compressor, step, learning_rate) for compressor in self._scheduled]
        if in_step == self._in_step and not self._awaits_begin:
            return
        self._in_step = in_step
        present = self._get_form(plan, step, learning_rate)
        self._awaits_begin = any(
            cold_start(compressor) is not None for name, compressor in plan.layers.items() if name not in self._begun
        )
        if present.layers != self._present.layers or not self._known:
            self._present = present
            self.number = self._known.setdefault(present.hash, len(self._known))
            coded = [c for c in present.layers.values() if isinstance(c, Coded)]
            self._learns_at = {name: steps for name, c in present.layers.items() if (steps := learns_at(c))}
            sums = any(isinstance(c, Summed) for c in present.layers.values())
            self._raw_is_summed = sums and all(isinstance(c, Raw) for c in coded)
        self.steady = None if self._scheduled or self._awaits_begin or self._learns_at else plan

    def add(self, name: str, plan: Plan, step: int, learning_rate: float | None) -> None:
        """Add a layer that ``plan`` has only now; for the others the addition counts from the next step on."""
        late = self._get_form(plan, step, learning_rate)[name]
        self._present = replace(self._present, layers={**self._present.layers, name: late})
        self._learns_at |= {name: steps} if (steps := learns_at(late)) else {}

    def learning(self, names: Iterable[str], step: int) -> tuple[str, ...]:
        """Return those of the layers that learn in ``step``: in the steps of their compressor, and from the first of
        these on until they have learned. All ranks find the same, as they share what is learned."""
        return tuple(name for name in names if name in self._learns_at and self._learns(name, step))

    def _learns(self, name: str, step: int) -> bool:
        steps = self._learns_at[name]
        if step < min(steps):
            return False
        if name not in self._learned and self._slots.moved(name, self[name], self._shapes[name], learned=True):
            self._learned.add(name)
        return step in steps or name not in self._learned

    def __getitem__(self, name: str) -> Compressor:
        """Return a layer's compressor in this step. Raw layers join the sums where no messages can carry them."""
        compressor = self._present[name]
        return RawSum() if isinstance(compressor, Raw) and self._raw_is_summed else compressor

    def _get_form(self, plan: Plan, step: int, learning_rate: float | None) -> Plan:
        for name, compressor in plan.layers.items():
            if name in self._begun or cold_start(compressor) is None:
                continue
            if self._slots.moved(name, compressor, self._shapes[name]):
                self._begun.add(name)
        return plan.at_step(step, learning_rate).for_world(self._num_ranks, self._shapes).with_cold_starts(self._begun)
