"""A Wire's state as a flat dictionary of tensors, and back, also into a world of another size.

Checksums of all entries are part of the state: one that was damaged in storage is refused, with the entry's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.compressors import Compressor, Slot
from thinwire.kernels import FORMAT_VERSION
from thinwire.plan import Plan
from thinwire.runtime.consistency import agree, signed_checksum
from thinwire.runtime.slots import Owners, Slots, reshard

_SPEC_ROOM = 128
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LARGEST_STEP = 2**62
_SHARED = ("step", "seed", "format_version", "shares", "plan")
_CHECKSUMS = "checksums"


@dataclass(frozen=True)
class LoadedState:
    """One rank's part of a loaded state."""

    step: int
    seed: int
    plan: Plan
    slots: dict[tuple[str, str], Tensor]
    """Slots by layer and slot name."""

    def record(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks, in the order in which a difference is best reported."""
        return {"step": str(self.step), "seed": str(self.seed), "plan": self.plan.hash}

    def shared(self, *, learned: bool = True) -> dict[str, Tensor]:
        """Return the slots that all ranks share; with ``learned`` False those of them that are not learned."""
        return {
            f"{slot.name} of {name}": self.slots[name, slot.name]
            for name, compressor in self.plan.layers.items()
            for slot in _saved(compressor)
            if slot.shared and (learned or not slot.learned)
        }


@dataclass(frozen=True)
class CheckedState:
    """A state that is valid on this rank."""

    record: Mapping[str, str]
    """Facts that must be equal on all ranks, by name."""
    shared: Mapping[str, Tensor]
    """Tensors that must be equal on all ranks, by name."""
    adopt: Callable[[], None]
    """Function that continues from the state."""


def _key(rank: int, slot: str, name: str) -> str:
    return f"rank{rank}/{slot}/{name}"


Read = Mapping[str, Mapping[str, Tensor]]
"""Moments by parameter and name."""


class Moments(Protocol):
    """The part of an optimizer's state of each parameter that differs between ranks."""

    def state(self, rank: int) -> dict[str, Tensor]:
        """Return the entries of this rank for `Wire.state_dict`."""
        ...

    def template(self, world_size: int) -> dict[str, Tensor]:
        """Return the entries of all ranks of a world of this size, to load such a checkpoint into."""
        ...

    def read(self, state: Mapping[str, Tensor], rank: int, world_size: int) -> Read:
        """Return the moments of ``rank`` from such entries. Raises ``ValueError`` if they cannot be used."""
        ...

    def load(self, moments: Read) -> None:
        """Continue with these moments."""
        ...


def write(
    slots: Slots,
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    *,
    step: int,
    seed: int,
    rank: int,
    shares: Sequence[int],
) -> dict[str, Tensor]:
    """Return shared entries, and this rank's slots with their layers' shapes; checksums of both.

    Shared entries are step, seed, wire format, plan, and how much of each layer every rank owned.
    """
    shared = {
        "step": torch.tensor(step, dtype=torch.int64, device="cpu"),
        "seed": torch.tensor(seed, dtype=torch.int64, device="cpu"),
        "format_version": torch.tensor(FORMAT_VERSION, dtype=torch.int64, device="cpu"),
        "shares": torch.tensor(shares, dtype=torch.int64, device="cpu"),
        "plan": _text(plan),
    }
    mine: dict[str, Tensor] = {}
    for name, compressor in plan.layers.items():
        for slot in _saved(compressor):
            value = slots.value(name, slot, shapes[name]).cpu()
            mine[_key(rank, slot.name, name)] = value.view(slot.shape_for(shapes[name]))
    return sealed(shared) | (sealed(mine, f"rank{rank}/{_CHECKSUMS}") if mine else {})


def sealed(entries: Mapping[str, Tensor], name: str = _CHECKSUMS) -> dict[str, Tensor]:
    """Return ``entries``, and under ``name`` a 64-bit checksum of each of them, in the order of their names."""
    sums = [signed_checksum(entries[key]) for key in sorted(entries)]
    return {**entries, name: torch.tensor(sums, dtype=torch.int64, device="cpu")}


def check_sealed(state: Mapping[str, Tensor], keys: Iterable[str], name: str = _CHECKSUMS) -> None:
    """Check that the entries ``keys`` of a state are those that `sealed` was given.

    Raises:
        ValueError: an entry or the checksums are missing, or differ from what was saved.
    """
    keys = sorted(keys)
    if missing := [key for key in (*keys, name) if not isinstance(state.get(key), Tensor)]:
        raise ValueError(f"the state lacks {missing[0]}: it is incomplete, or not of this model")
    sums = integers(state, name, len(keys))
    for key, expected in zip(keys, sums, strict=True):
        if signed_checksum(state[key].cpu()) != expected:
            raise ValueError(
                f"{key} in the state is not what was saved (its checksum differs): the file was damaged or changed. "
                "Load an earlier checkpoint, or start without this state"
            )


def _text(plan: Plan) -> Tensor:
    # The size is the same for any compressors: checkpoints are loaded into tensors of the size that was saved.
    room = sum(len(name.encode()) + _SPEC_ROOM for name in plan)
    return torch.frombuffer(bytearray(plan.to_json().encode().ljust(room)), dtype=torch.uint8)


def template(plan: Plan, shapes: Mapping[str, Sequence[int]], size: int) -> dict[str, Tensor]:
    """Return what `write` returns on all ranks of a world of ``size``, merged, with slots of zeros."""
    state: dict[str, Tensor] = {}
    for rank in range(size):
        state |= write(Slots(), plan, shapes, step=-1, seed=0, rank=rank, shares=[1] * size)
    return state


def gather(state: Mapping[str, Tensor], transport: Transport) -> dict[str, Tensor]:
    """Merge the states of all ranks: rank 0's shared entries, and the slots of every rank. A collective call.

    All ranks have entries of the same names (but for the rank in the names of slots), shapes and dtypes.

    Raises:
        DisagreementError: the ranks' states do not belong together.
    """
    prefix = f"rank{transport.rank}/"
    slots = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    shared = {key: value for key, value in state.items() if not key.startswith(prefix)}
    entries = [
        *((f"entry {key}", value) for key, value in shared.items()),
        *((f"slot {n}", v) for n, v in slots.items()),
    ]
    agree({key: f"{value.dtype} {tuple(value.shape)}" for key, value in entries}, transport)
    gathered: dict[str, Tensor] = {}
    for key, value in shared.items():
        gathered[key] = value.clone()
        transport.broadcast(gathered[key])
    for name, value in slots.items():
        for rank, row in enumerate(transport.all_gather(value.contiguous())):
            gathered[f"rank{rank}/{name}"] = row.clone()
    return gathered


def integers(state: Mapping[str, Tensor], name: str, count: int | None = 1) -> list[int]:
    """Return the integers of an entry, ``count`` of them, or any number for None. Raises ``ValueError`` otherwise."""
    entry = state[name]
    if not isinstance(entry, Tensor) or entry.dtype not in _INTEGERS or count not in (None, entry.numel()):
        shown = f"{entry.dtype} of {entry.numel()}" if isinstance(entry, Tensor) else type(entry).__name__
        raise ValueError(f"{name} in the state is {shown}, not {'a tensor of' if count is None else count} integers")
    return [int(value) for value in entry.reshape(-1).tolist()]


def read(
    state: Mapping[str, Tensor],
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    rank: int,
    shares: Sequence[int],
    get_owners: Callable[[str, Compressor, Sequence[int]], Owners],
) -> LoadedState:
    """Return ``rank``'s part of a state in a world whose ranks own these shares. See `Wire.load_state_dict`.

    ``get_owners`` says who holds what of a layer's residual, given its compressor and the shares of the state's world.
    """
    missing = set(_SHARED) - set(state)
    if missing:
        raise ValueError(f"this is not the state of a Wire: {', '.join(sorted(missing))} missing")
    (version,), (step,), (seed,) = (integers(state, name) for name in ("format_version", "step", "seed"))
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the state has wire format {version}, this version of thinwire has {FORMAT_VERSION}: "
            "resume with the version that wrote it, or start without this state"
        )
    check_sealed(state, _SHARED)
    if not -1 <= step < LARGEST_STEP or not 0 <= seed < 2**63:
        raise ValueError(f"the state is of step {step} with seed {seed}, which cannot be")
    saved = saved_plan(state, plan)
    old_shares = integers(state, "shares", None)
    if not old_shares or min(old_shares) < 0:
        raise ValueError(f"the state says that its ranks owned {old_shares} of each layer, which no world does")
    slots = {}
    resharded = old_shares != list(shares)
    ranks = range(len(old_shares)) if resharded else (rank,)
    for r in ranks:
        _check_slots(state, saved, r)
    for name, compressor in saved.layers.items():
        for slot in _saved(compressor):
            values = [_find(state, r, slot, name, shapes[name]) for r in ranks]
            owners = get_owners(name, compressor, old_shares)
            for r, value in zip(ranks, values, strict=True) if slot.shape is None and owners.in_chunks else ():
                check_held(value, owners.before(r) if resharded else owners.mine(), _key(r, slot.name, name))
            slots[name, slot.name] = reshard(values, slot, owners) if resharded else values[0]
    return LoadedState(step, seed, saved, slots)


def check_held(value: Tensor, weights: Tensor, key: str) -> None:
    """Raise ``ValueError`` unless the entry ``key`` of a state is zero where the rank that it is of holds nothing."""
    if bool((value[weights == 0] != 0).any()):
        raise ValueError(f"{key} in the state is of another shard: its mesh had the ranks in another order")


def saved_plan(state: Mapping[str, Tensor], plan: Plan) -> Plan:
    """Return the plan that a state was saved with. Raises ``ValueError`` if its layers are not those of ``plan``."""
    try:
        text = bytes(integers(state, "plan", None)).decode()
    except ValueError as error:
        raise ValueError(f"the plan in the state is not text: {error}") from None
    saved = plan.with_json(text)
    if set(saved) != set(plan):
        differing = sorted(set(saved) ^ set(plan))
        raise ValueError(
            f"the state is of a model with other layers; the first that differs is {differing[0]}. What was trained "
            "when it was saved must not be frozen when thinwire.compress() is called"
        )
    return saved


def _saved(compressor: Compressor) -> list[Slot]:
    return [slot for slot in compressor.slots if not slot.scratch]


def _check_slots(state: Mapping[str, Tensor], plan: Plan, rank: int) -> None:
    keys = [_key(rank, slot.name, name) for name, compressor in plan.layers.items() for slot in _saved(compressor)]
    for key in keys:
        if key not in state:
            raise ValueError(
                f"the state lacks {key}: it does not hold the slots of all ranks. Where one rank writes the "
                "checkpoint, or another number of ranks reads it, save wire.gather_state_dict(), called on every rank; "
                "wire.state_dict() is for checkpoints in which every rank writes, and finds again, its own"
            )
    if keys:
        check_sealed(state, keys, f"rank{rank}/{_CHECKSUMS}")


def _find(state: Mapping[str, Tensor], rank: int, slot: Slot, name: str, shape: Sequence[int]) -> Tensor:
    key, numel = _key(rank, slot.name, name), math.prod(slot.shape_for(shape))
    if not isinstance(state[key], Tensor) or state[key].is_complex():
        raise ValueError(f"{key} in the state is not a tensor of real numbers")
    if state[key].numel() != numel:
        raise ValueError(f"{key} has {state[key].numel()} elements in the state, {numel} in the model")
    value = state[key].detach().to("cpu", slot.dtype, copy=True).reshape(-1)
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{key} in the state holds NaN or Inf: load an earlier checkpoint")
    return value
