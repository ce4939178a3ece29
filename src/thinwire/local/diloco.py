"""DiLoCo: workers train alone for many steps, then average what they learned (Douillard et al. 2023, 2311.08105)."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import CommunicationError, Transport, parse_algorithm
from thinwire.compat import group_timeout
from thinwire.compressors import Compressor, Raw, Wrapper, check_int, ef, parse
from thinwire.integrations.options import Network
from thinwire.integrations.transports import host_transport
from thinwire.local.fragments import balanced_fragments
from thinwire.local.members import Group, Manager, Members
from thinwire.local.outer import Nesterov, default_outer
from thinwire.plan import Plan
from thinwire.runtime import Wire, agree, on_the_host
from thinwire.runtime.checkpoint import check_sealed, sealed
from thinwire.runtime.consistency import signed_checksum

_FEW_ROUNDS = 100
_HIGH_GAIN = 2.0


class DiLoCo:
    """Train a replica of the model on every worker alone, and exchange compressed progress every few tens of steps.

    ::

        local = thinwire.local.DiLoCo(model, optimizer, every=25)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()          # exchanges every 25th time
        local.finish()            # all workers end with the same weights

    All workers hold the same *shared* weights A (fp32). Every ``every`` steps a worker sends its pseudo-gradient
    ``A − w``, compressed as gradients are, with error feedback; the mean d over all workers moves the shared weights by
    ``outer``, and training goes on from them. The inner optimizer's state stays with its worker. With ``fragments`` the
    model is exchanged part by part, and with ``overlap`` an exchange takes place while the next steps are computed
    (Streaming DiLoCo, 2501.18512).

    The model is a plain module, or one under ``fully_shard``: then ``group`` holds the ranks that have the same shards,
    and the outer state is sharded as the parameters are. For several workers on a node that average gradients in every
    step, wrap the model in ``DistributedDataParallel`` over the node's ranks, and let ``group`` be all ranks.

    Memory: four fp32 values a parameter on each worker (shared weights, outer momentum, residual, mean), a fifth with
    ``overlap`` and ``mix="keep"``; all of them on ``outer_device``.

    Args:
        model: the module whose trainable parameters are exchanged. Workers start from rank 0's.
        inner_optimizer: the optimizer that trains it on this worker; it must hold all of these parameters.
        every: inner steps from one exchange of a parameter to its next (H).
        outer: the outer optimizer; by default ``Nesterov(lr=0.7, momentum=0.5)``, or plain averages,
            ``Nesterov(lr=1, momentum=0)``, where ``total_steps`` leaves fewer than 20 exchanges.
        compressor: compressor or spec of the pseudo-gradients; biases, norms and small layers are sent raw.
        feedback: whether what compression leaves out is added to the next exchange.
        fragments: parts of the model that are exchanged in turn, ``every / fragments`` steps apart; must divide
            ``every``.
        overlap: inner steps between sending a fragment and using its mean (τ); below ``every / fragments``.
        mix: what an arriving mean does to the worker's own progress since it was sent: ``"keep"`` adds it to the new
            shared weights; a number α mixes, ``α·w + (1 − α)·A``. Without ``overlap``, ``"keep"`` takes A.
        weighted: weight workers by the tokens that they say with ``step(tokens=...)``, for unequal batches.
        group: process group of the workers; all ranks by default. With ``manager``, the ``torchft.ProcessGroupGloo``
            that the manager was made with.
        manager: a ``torchft.Manager``, for workers that come and go (see docs/members.md). The constructor then waits
            until this worker has the others' shared weights. Not with ``fragments`` or ``overlap``.
        network: collective algorithm, transport and timeout of the exchanges, as for `thinwire.compress`.
        seed: seed of the compressor's random draws.
        outer_device: where the outer state is kept, and compressed; the parameters' device by default. ``"cpu"`` leaves
            a GPU's memory to training, and weights cross to the host and back once in ``every`` steps.
        total_steps: inner steps of the whole training if known; settles the default of ``outer``, and whether a warning
            about it applies.

    Raises:
        ValueError: an argument is outside its range, or the optimizer lacks a parameter.
        TypeError: the parameters are not floating point.
        DisagreementError: workers gave different arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int = 25,
        outer: Nesterov | None = None,
        compressor: str | Compressor = "gaussian(bits=2)",
        feedback: bool = True,
        fragments: int = 1,
        overlap: int = 0,
        mix: Literal["keep"] | float = "keep",
        weighted: bool = False,
        group: dist.ProcessGroup | Group | None = None,
        manager: Manager | None = None,
        network: Network | None = None,
        seed: int = 0,
        outer_device: torch.device | str | None = None,
        total_steps: int | None = None,
    ) -> None:
        check_int("every", every, 1)
        exchanges = None if total_steps is None else total_steps / every
        self.outer = default_outer(exchanges) if outer is None else outer
        self.every, self.overlap, self.weighted = every, overlap, weighted
        self.mix: Literal["keep"] | float = mix
        self._managed = manager is not None
        self.group = None if self._managed else cast("dist.ProcessGroup | None", group)
        self._module = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad and _local(p).numel()}
        self._check(parameters, inner_optimizer, fragments, exchanges)
        self._buffers = [b for b in self._module.buffers() if b.is_floating_point()]
        if manager is None:
            with torch.no_grad():
                for tensor in (*parameters.values(), *self._module.buffers()):
                    dist.broadcast(_local(tensor), group=self.group, group_src=0)
        shapes = {name: tuple(_local(p).shape) for name, p in parameters.items()}
        chosen = parse(compressor)
        if feedback and not isinstance(chosen, Raw | Wrapper):
            chosen = ef(chosen)
        plan = Plan.build(shapes, chosen)
        names = balanced_fragments({name: math.prod(shape) for name, shape in shapes.items()}, fragments)
        device = None if outer_device is None else torch.device(outer_device)
        self._fragments = [
            _Fragment({name: parameters[name] for name in part}, keeps=self._keeps, device=device) for part in names
        ]
        self._steps = 0
        self._tokens = 0
        self._next = 0
        self._pending: _Exchange | None = None
        self.skipped_rounds = 0
        """Exchanges that were dropped because some worker's weights were not finite."""
        network, arguments = network or Network(), self._arguments(fragments)
        self._members: Members | None = None
        if manager is None:
            self._static_wire = _open_wire(plan, shapes, self.group, network, seed, arguments)
            return
        if not hasattr(type(group), "parent"):
            raise TypeError(f"with manager=, group is the torchft.ProcessGroupGloo of the manager, not {group!r}")
        self._rounds = 0
        """Exchanges whose means are in the shared weights."""
        self._last_exchange = 0
        """The number of the last of them."""
        self._work = 0
        """Inner steps, or tokens, of this worker that are in none of them."""
        self._unsettled: tuple[int, Tensor, int] | None = None
        """Number, sent weights and work of an exchange that failed here: it may have succeeded on others."""

        def open_wire(transport: Transport) -> Wire:
            # A number of its own for each set of workers, or draws would repeat.
            with on_the_host():
                agree(arguments | {"round": str(self._rounds)}, transport)
                own_seed = (seed + self._rounds) % 2**63
                return Wire(plan, shapes, transport, seed=own_seed, algorithm=parse_algorithm(network.algorithm))

        self._members = Members(
            manager, cast("Group", group), open_wire=open_wire, save=self._shared_state, load=self._take_shared_state
        )
        while not self._exchange(self._members):
            pass

    def _check(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        fragments: int,
        rounds: float | None,
    ) -> None:
        check_int("fragments", fragments, 1)
        check_int("overlap", self.overlap, 0)
        if self.every % fragments:
            raise ValueError(f"fragments must divide every: {fragments} does not divide {self.every}")
        if self.overlap >= self.every // fragments:
            raise ValueError(
                f"overlap must be below every / fragments, {self.every // fragments}, not {self.overlap}: a fragment "
                "has to arrive before the next one is sent"
            )
        if self.mix != "keep" and not (isinstance(self.mix, int | float) and 0 <= self.mix <= 1):
            raise ValueError(f"mix must be 'keep' or a number between 0 and 1, not {self.mix!r}")
        held = {id(p) for param_group in optimizer.param_groups for p in param_group["params"]}
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise TypeError(f"{name} is {parameter.dtype}, and pseudo-gradients are floating point")
            if id(parameter) not in held:
                raise ValueError(f"the inner optimizer does not hold {name}: make it after the model is wrapped")
        if self._managed and (fragments > 1 or self.overlap):
            raise ValueError("fragments and overlap do not go with a manager: give it an exchange of the whole model")
        if self.group is None and any(_is_sharded(p) for p in parameters.values()):
            raise ValueError("the model is sharded: give group=, the process group of the ranks with the same shards")
        if self.outer.gain > _HIGH_GAIN and (rounds is None or rounds < _FEW_ROUNDS):
            warnings.warn(
                f"outer={self.outer} has a gain lr / (1 - momentum) of {self.outer.gain:.1f}, which suits thousands of "
                f"rounds; with fewer than about {_FEW_ROUNDS}, Nesterov(lr=0.7, momentum=0.5) ends at a lower loss",
                stacklevel=3,
            )
        if rounds is not None and rounds < 2:
            warnings.warn(
                f"every={self.every} leaves {rounds:.1f} exchanges in {rounds * self.every:.0f} steps: workers hardly "
                "learn from each other; exchange more often",
                stacklevel=3,
            )

    def _arguments(self, fragments: int) -> dict[str, str]:
        """What all workers must have in common beside the plan and the seed."""
        names = ("every", "outer", "overlap", "mix", "weighted")
        return {name: str(getattr(self, name)) for name in names} | {"fragments": str(fragments)}

    @property
    def _keeps(self) -> bool:
        return self.overlap > 0 and self.mix == "keep"

    @property
    def interval(self) -> int:
        """Inner steps between two exchanges, of whichever fragment."""
        return self.every // len(self._fragments)

    @property
    def wire(self) -> Wire:
        """The handle of the exchanges: ``wire.stats``, ``wire.plan``."""
        return self._static_wire if self._members is None else self._members.wire

    @property
    def members(self) -> Members | None:
        """With ``manager``, who takes part: ``members.names``, and counts of who ``came`` and ``left``."""
        return self._members

    @property
    def steps(self) -> int:
        """Inner steps so far."""
        return self._steps

    @property
    def fragments(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each fragment."""
        return [list(fragment.names) for fragment in self._fragments]

    @property
    def peak_bytes(self) -> int:
        """Bytes that this worker sends in the largest exchange: what the link must carry in one burst."""
        return max(self._exchange_bytes(fragment) for fragment in self._fragments)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this worker sends an inner step, on average."""
        return sum(self._exchange_bytes(fragment) for fragment in self._fragments) / self.every

    def _exchange_bytes(self, fragment: _Fragment) -> int:
        n, plan = self.wire.world_size, self.wire.plan
        payloads = sum(plan[name].wire_bytes(shape) for name, shape in fragment.layers)
        return math.ceil(payloads * 2 * (n - 1) / n)

    def step(self, tokens: int | None = None) -> None:
        """Count an inner step, and exchange a fragment if it is time. Call it after the inner optimizer's step.

        Args:
            tokens: with ``weighted=True``, how much data this worker's step has seen.

        Raises:
            ValueError: ``tokens`` is missing with ``weighted=True``, or given without.
            TransportError, PeerFailedError: an exchange failed.
        """
        if (tokens is None) == self.weighted:
            needed = "step(tokens=...) is needed" if self.weighted else "step() takes no tokens"
            raise ValueError(f"{needed} with weighted={self.weighted}")
        self._steps += 1
        self._tokens += tokens or 0
        if self._members is not None:
            self._work += 1 if tokens is None else tokens
            if self._steps % self.every == 0:
                self._exchange(self._members)
            return
        if (self._steps + self.overlap) % self.interval == 0:
            self._send(self._next)
        if self._steps % self.interval == 0:
            self._receive()

    def finish(self) -> None:
        """Exchange what every worker has learned since its last exchange; all workers end with the shared weights.

        Call it once after the last `step`, on every worker. Training may go on afterwards. With ``manager``, it is
        repeated until it succeeds, with those who are there.
        """
        if self._members is not None:
            while self._work and not self._exchange(self._members):
                pass
            return
        self._receive()
        late = [i for i, fragment in enumerate(self._fragments) if fragment.sent_at != self._steps]
        self._next = 0
        for i in late:
            self._send(i, opens_round=i == late[0])
            self._receive()
        self._next = 0
        for fragment in self._fragments:
            fragment.write(fragment.anchor)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Put the shared weights into the model, to evaluate or save them, and this worker's own back on leaving."""
        own = [fragment.read() for fragment in self._fragments]
        try:
            for fragment in self._fragments:
                fragment.write(fragment.anchor)
            yield
        finally:
            for fragment, weights in zip(self._fragments, own, strict=True):
                fragment.write(weights)

    def _send(self, index: int, *, opens_round: bool | None = None) -> None:
        """Start the exchange of a fragment. All exchanges of a round are buckets of one step of the Wire."""
        assert self._pending is None, "one exchange at a time"
        if index == 0 if opens_round is None else opens_round:
            self.wire.begin_step()
        fragment = self._fragments[index]
        weights = fragment.read()
        torch.sub(fragment.anchor, weights, out=fragment.mean)
        if self.weighted:
            fragment.mean.mul_(self._share())
        if fragment.sent is not None:
            fragment.sent.copy_(weights)
        fragment.sent_at = self._steps
        self._pending = _Exchange(index, self.wire.reduce(fragment.mean, fragment.layers))
        self._next = (index + 1) % len(self._fragments)

    def _exchange(self, members: Members) -> bool:
        """Exchange the model with the workers that are there; whether it counts.

        One that fails changes nothing here: the worker goes on from its own weights, and what it has learned is part of
        its next exchange. It may have succeeded on another worker. Then all of this worker's message was in it, for
        nobody has the mean without everybody's message, and `_take_shared_state` brings the result.
        """
        members.start_quorum()
        if self._unsettled is not None:
            members.wire.discard_step()
            self._unsettled = None
        (fragment,) = self._fragments
        weights = fragment.read()
        torch.sub(fragment.anchor, weights, out=fragment.mean)
        number, buffers = 0, []
        try:
            work = self._work if self.weighted else int(self._work > 0)
            shared = signed_checksum(fragment.anchor.cpu()) ^ signed_checksum(fragment.momentum.cpu())
            share, number = members.meet(work, shared)
            fragment.mean.mul_(share)
            members.wire.begin_step()
            self._unsettled = number, weights, self._work
            members.wire.reduce(fragment.mean, fragment.layers).wait()
            buffers = members.average(self._buffers, share)
        except CommunicationError as error:
            members.give_up(error)
        if not members.commit():
            return False
        self._unsettled = None
        self._rounds, self._last_exchange = self._rounds + 1, number
        self._work, fragment.sent_at = 0, self._steps
        if self._apply(fragment):
            for buffer, mean in zip(self._buffers, buffers, strict=True):
                buffer.copy_(mean)
        return True

    def _shared_state(self) -> dict[str, Tensor]:
        """What all workers have in common after an exchange, for one that lacks it, and for checkpoints."""
        state = {
            "rounds": torch.tensor(self._rounds),
            "exchange": torch.tensor(self._last_exchange),
            "steps": torch.tensor(self._steps),
        }
        state |= {f"buffer/{i}": buffer.detach().clone() for i, buffer in enumerate(self._buffers)}
        return sealed(state | {name: v.clone() for name, v in self._fragments[0].saved(with_mean=False).items()})

    def _take_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the shared state of other workers, which have made exchanges that this one has not.

        What this worker has learned since its last exchange goes into the next one if it has missed one at most, and is
        dropped if it was away for longer. Where the one it missed has its message, only what came later is left.
        """
        (fragment,) = self._fragments
        check_sealed(state, [key for key in state if key != "checksums"])
        rounds, number, steps = (int(_entry(state, name, ())) for name in ("rounds", "exchange", "steps"))
        base = fragment.anchor
        if self._unsettled is not None and self._unsettled[0] == number:
            _, base, sent = self._unsettled
            self._unsettled, self._work = None, self._work - sent
        elif rounds > self._rounds + 1:
            base, self._work = fragment.read(), 0
        learned = fragment.read() - base
        for name, values in fragment.saved(with_mean=False).items():
            values.copy_(_entry(state, name, values.shape))
        for i, buffer in enumerate(self._buffers):
            buffer.copy_(_entry(state, f"buffer/{i}", buffer.shape))
        fragment.write(fragment.anchor + learned)
        self._rounds, self._last_exchange, self._steps = rounds, number, steps

    def _share(self) -> float:
        """This worker's weight in the mean, 1 on average: its tokens since the last exchange over the mean."""
        total = torch.tensor([float(self._tokens)])
        dist.all_reduce(total, group=self.group)
        share = self._tokens * self.wire.world_size / float(total) if total > 0 else 1.0
        self._tokens = 0
        return share

    def _receive(self) -> None:
        """Wait for the exchange under way, if there is one, and go on from its result."""
        if self._pending is None:
            return
        index, self._pending = self._pending.wait(), None
        if self._apply(self._fragments[index]) and self._next == 0:
            self._average_buffers()

    def _apply(self, fragment: _Fragment) -> bool:
        """Move the shared weights by the mean that has arrived; whether it is finite."""
        if not bool(torch.isfinite(fragment.mean).all()):
            # The same on every worker, and the Wire leaves its residuals alone: as if the round had not been.
            self.skipped_rounds += 1
            warnings.warn(
                f"an exchange at step {self._steps} was dropped: a worker's weights are not finite. All workers "
                "go on from the shared weights; that worker's optimizer may hold NaN still",
                stacklevel=4,
            )
            fragment.write(fragment.anchor)
            return False
        self.outer.update(fragment.anchor, fragment.momentum, fragment.mean)
        fragment.take_shared(self.mix)
        return True

    def _average_buffers(self) -> None:
        for buffer in self._buffers:
            dist.all_reduce(buffer, group=self.group)
            buffer.div_(self.wire.world_size)

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's state, for its own checkpoint beside the model's and the inner optimizer's.

        Waits for an exchange under way; its result is part of the state. A training that resumes with it, with as many
        workers, continues bit for bit. With ``manager``, it is the state that all workers share, without residuals:
        one of them saves it, and all load it.
        """
        if self._members is not None:
            return self._shared_state()
        return self._own_state() | {f"wire/{key}": value for key, value in self.wire.state_dict().items()}

    def gather_state_dict(self) -> dict[str, Tensor]:
        """The state of all workers merged, on every worker: for one file, written by one rank. Collective.

        Workers that load it, however many, start from the shared weights: what each has learned since its last exchange
        is not in it. Right after an exchange of the whole model (``fragments=1``, ``overlap=0``) nothing is lost.
        """
        if self._members is not None:
            return self._shared_state()
        state = self._own_state() | {"gathered": torch.tensor(1)}
        return state | {f"wire/{key}": value for key, value in self.wire.gather_state_dict().items()}

    def _own_state(self) -> dict[str, Tensor]:
        if self._pending is not None:
            self._pending.wait()
        pending = -1 if self._pending is None else self._pending.index
        counts = {"steps": self._steps, "tokens": self._tokens, "next": self._next, "pending": pending}
        state = {name: torch.tensor(value) for name, value in counts.items()}
        for i, fragment in enumerate(self._fragments):
            state[f"sent_at/{i}"] = torch.tensor(fragment.sent_at)
            for name, values in fragment.saved(with_mean=i == pending).items():
                state[name] = values.clone()
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, on every worker, after the model's and the inner optimizer's were loaded.

        Raises:
            ValueError: the state is of another model or of another number of fragments.
        """
        if self._members is not None:
            self._work, self._unsettled = 0, None
            self._fragments[0].write(self._fragments[0].anchor)
            self._take_shared_state(state)
            return
        self._receive()
        check_sealed(state, [k for k in state if not k.startswith("wire/") and k not in ("gathered", "checksums")])
        counts = {name: int(_entry(state, name, ())) for name in ("steps", "tokens", "next", "pending")}
        self.wire.load_state_dict({k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")})
        for i, fragment in enumerate(self._fragments):
            fragment.sent_at = int(_entry(state, f"sent_at/{i}", ()))
            for name, values in fragment.saved(with_mean=i == counts["pending"]).items():
                values.copy_(_entry(state, name, values.shape))
        self._steps, self._tokens, self._next = counts["steps"], counts["tokens"], counts["next"]
        if 0 <= counts["pending"] < len(self._fragments):
            self._pending = _Exchange(counts["pending"])
        if "gathered" in state:
            self._receive()
            for fragment in self._fragments:
                fragment.write(fragment.anchor)

    def close(self) -> None:
        """End the exchanges' threads and process groups, after `finish`, on every worker."""
        self._receive()
        self.wire.detach()


@dataclass
class _Fragment:
    """A part of the model, and its outer state as flat fp32 tensors."""

    parameters: Mapping[str, nn.Parameter]
    keeps: bool
    """Whether the weights at sending are needed when the mean arrives."""
    device: torch.device | None
    """Where the outer state is; None: where the parameters are."""
    sent_at: int = 0
    """The inner step after which it was sent last."""
    anchor: Tensor = field(init=False)
    momentum: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    """The pseudo-gradient, and once it has arrived its mean over workers."""
    sent: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.anchor = self.read()
        self.momentum = torch.zeros_like(self.anchor)
        self.mean = torch.zeros_like(self.anchor)
        self.sent = torch.zeros_like(self.anchor) if self.keeps else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    @property
    def layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each parameter, in the order in which they lie in the flat tensors."""
        return tuple((name, tuple(_local(p).shape)) for name, p in self.parameters.items())

    def read(self) -> Tensor:
        """The worker's weights, flat, in fp32, beside the outer state."""
        flat = torch.cat([_local(p).reshape(-1).float() for p in self.parameters.values()])
        return flat if self.device is None else flat.to(self.device)

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Set the worker's weights."""
        for parameter, values in zip(self.parameters.values(), self._split(weights), strict=True):
            _local(parameter).copy_(values.view(_local(parameter).shape))

    def take_shared(self, mix: Literal["keep"] | float) -> None:
        """Go on from the shared weights, with what the worker has learned since it sent its own."""
        if mix == "keep":
            self.write(self.anchor if self.sent is None else self.anchor + (self.read() - self.sent))
        else:
            self.write(self.anchor.lerp(self.read(), float(mix)))

    def saved(self, *, with_mean: bool) -> dict[str, Tensor]:
        """Views of the outer state, by parameter; the last exchange's only while it is under way."""
        kinds = {"anchor": self.anchor, "momentum": self.momentum}
        if with_mean:
            kinds |= {"mean": self.mean} | ({"sent": self.sent} if self.sent is not None else {})
        return {
            f"{kind}/{name}": values.view(_local(self.parameters[name]).shape)
            for kind, flat in kinds.items()
            for name, values in zip(self.parameters, self._split(flat), strict=True)
        }

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([_local(p).numel() for p in self.parameters.values()])


@dataclass
class _Exchange:
    """The exchange of a fragment: under way, or, without a future, arrived."""

    index: int
    future: torch.futures.Future[Tensor] | None = None

    def wait(self) -> int:
        """Wait until the mean is there; returns the fragment's index."""
        if self.future is not None:
            self.future.wait()
        return self.index


def _is_sharded(parameter: Tensor) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(parameter, distributed.DTensor)


def _local(parameter: Tensor) -> Tensor:
    """This rank's values of a parameter or buffer, without its gradient's history."""
    values = parameter.detach()
    return values.to_local() if _is_sharded(values) else values  # pyright: ignore[reportAttributeAccessIssue]


def _entry(state: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    value = state.get(name)
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        found = "is missing" if value is None else f"is {getattr(value, 'shape', value)}"
        raise ValueError(
            f"the state's {name!r} {found}, where {tuple(shape)} is wanted: it is of another model, of another "
            "number of fragments, or another worker's state_dict(); gather_state_dict() suits any number of workers"
        )
    return value


def _open_wire(
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    group: dist.ProcessGroup | None,
    network: Network,
    seed: int,
    arguments: dict[str, str],
) -> Wire:
    group = group or dist.group.WORLD
    assert group is not None, "init_process_group() comes first"
    timeout = network.timeout or group_timeout(group)
    arguments |= {"algorithm": str(network.algorithm), "transport": network.transport}
    with on_the_host():
        transport = host_transport(group, timeout, network.transport, arguments)
        try:
            return Wire(plan, shapes, transport, seed=seed, algorithm=parse_algorithm(network.algorithm))
        except Exception:
            transport.close()
            raise
