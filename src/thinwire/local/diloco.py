"""DiLoCo: workers train alone for many steps, then average what they learned (Douillard et al. 2023, 2311.08105)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import check_choice, check_int, check_number, warn_caller
from thinwire.collectives import contiguous_values
from thinwire.compat import group_timeout
from thinwire.compressors import Compressor
from thinwire.integrations.options import Network
from thinwire.integrations.transports import agreed_transport, carried, fail_before_meeting
from thinwire.local.fragments import (
    FEW_BITS,
    Fragment,
    LocalUpdates,
    Nesterov,
    balanced_fragments,
    exchange_algorithm,
    finite_mean,
    local_values,
    sent_in_exchange,
    state_entry,
)
from thinwire.optim.shards import is_sharded
from thinwire.plan import Plan
from thinwire.runtime import BucketEngine, Wire, WireSettings, on_the_host
from thinwire.runtime.checkpoint import check_sealed, sealed

_silent: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models that send nothing."""


class DiLoCo(LocalUpdates):
    """Train a replica of the model on every worker alone, and exchange compressed progress every few tens of steps.

    ::

        local = thinwire.local.DiLoCo(model, optimizer, every=25)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()          # exchanges every 25th time
        local.finish()            # all workers end with the same weights

    All workers have the same *shared* weights A (fp32). Every ``every`` steps a worker sends its pseudo-gradient
    ``A − w``, compressed as gradients are, with error feedback; the mean d over all workers moves the shared weights by
    ``outer``, and training goes on from them. The inner optimizer's state stays with its worker. With ``fragments`` the
    model is exchanged part by part, and with ``overlap`` an exchange takes place while the next steps are computed
    (Streaming DiLoCo, 2501.18512).

    The model is a plain module, or one under ``fully_shard``: then ``group`` holds the ranks that have the same shards,
    and the outer state is sharded as the parameters are. In a pipeline it is a stage's module, and ``group`` the ranks
    that have the same stage. For several workers on a node that average gradients in every
    step, wrap the model in ``DistributedDataParallel`` over the node's ranks, and let ``group`` be all ranks.

    Memory of the outer state, on ``outer_device``: 16 bytes a parameter on each worker (shared weights, momentum, and
    the residual twice), 4 more during an exchange, and 4 more with ``overlap`` and ``mix="keep"``. With
    ``outer=Nesterov(dtype=torch.bfloat16)`` and ``compressor="ef(gaussian(bits=2, bucket=256), bits=8)"`` 16 become 8.

    Args:
        model: the module whose trainable parameters are exchanged. Workers start from rank 0's.
        inner_optimizer: the optimizer that trains it on this worker; it must have all of these parameters.
        every: inner steps from one exchange of a parameter to its next (H).
        outer: the outer optimizer; by default ``Nesterov(lr=0.7, momentum=0.5)``, or plain averages,
            ``Nesterov(lr=1, momentum=0)``, where ``total_steps`` leaves fewer than 20 exchanges.
        compressor: compressor or spec of the pseudo-gradients. A quantizer with feedback takes biases, norms and small
            layers, too, where that makes them smaller; others leave them raw.
        feedback: whether what compression leaves out is added to the next exchange.
        fragments: parts of the model that are exchanged in turn, ``every / fragments`` steps apart; must divide
            ``every``.
        overlap: inner steps between sending a fragment and using its mean (τ); below ``every / fragments``.
        mix: how a received mean is combined with the worker's own progress since it sent: ``"keep"`` adds it to the new
            shared weights; a number α mixes, ``α·w + (1 − α)·A``. Without ``overlap``, ``"keep"`` takes A.
        weighted: weight workers by the tokens that they say with ``step(tokens=...)``, for unequal batches.
        group: process group of the workers; all ranks by default. For workers that join and leave there is
            `ManagedDiLoCo`.
        network: collective algorithm, transport and timeout of the exchanges, as for `thinwire.compress`. Where no
            algorithm is given, two workers gather each other's messages (``allgather``): the bytes are those of other
            algorithms, and means are not coded again.
        seed: seed of the compressor's random draws.
        outer_device: where the outer state is kept, and compressed; the parameters' device by default. ``"cpu"`` leaves
            a GPU's memory to training, and weights cross to the host and back once in ``every`` steps.
        total_steps: inner steps of the whole training if known; settles the default of ``outer``, and whether a warning
            about it applies.

    Raises:
        ValueError: an argument is outside its range, or the optimizer lacks a parameter.
        TypeError: the parameters are not floating point, or ``outer`` is no `Nesterov`.
        DisagreementError: workers gave different arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int = 25,
        outer: Nesterov | None = None,
        compressor: str | Compressor = FEW_BITS,
        feedback: bool = True,
        fragments: int = 1,
        overlap: int = 0,
        mix: Literal["keep"] | float = "keep",
        weighted: bool = False,
        group: dist.ProcessGroup | None = None,
        network: Network = Network(),
        seed: int = 0,
        outer_device: torch.device | str | None = None,
        total_steps: int | None = None,
    ) -> None:
        # Workers meet, and agree, before anything is sent over the user's group.
        with fail_before_meeting(group):
            options = {"every": every, "outer": outer, "weighted": weighted, "total_steps": total_steps}
            super().__init__(model, inner_optimizer, compressor, feedback=feedback, **options)
            parameters, shapes = self._parameters, self._shapes
            self.overlap, self.group = overlap, group
            self.mix: Literal["keep"] | float = mix
            self._check(parameters, fragments)
            if isinstance(model, DistributedDataParallel):
                warn_about_averaged_gradients(model, group)
            names = balanced_fragments({name: math.prod(shape) for name, shape in shapes.items()}, fragments)
            device = None if outer_device is None else torch.device(outer_device)
            names_in_common = ("every", "outer", "overlap", "mix", "weighted")
            arguments = {name: str(getattr(self, name)) for name in names_in_common} | {"fragments": str(fragments)}
            self.wire = _open_wire(self._plan, shapes, group, network, seed, arguments)
            """Handle of the exchanges: ``wire.stats``, ``wire.plan``."""
        with torch.no_grad():
            for tensor in filter(lambda t: local_values(t).numel(), (*model.parameters(), *model.buffers())):
                with contiguous_values(local_values(tensor)) as values:
                    dist.broadcast(values, group=group, group_src=0)
        keeps = overlap > 0 and mix == "keep"
        self._fragments = [
            Fragment({n: parameters[n] for n in part}, keeps, device, self.outer.dtype, self._gathering())
            for part in names
        ]
        self._steps = 0
        self._tokens = 0
        """Tokens of this worker since the last exchange, of whichever fragment."""
        self._share = 1.0
        """Weight of this worker in that exchange, 1 on average."""
        self._next = 0
        self._pending: tuple[int, torch.futures.Future[Tensor] | None] | None = None
        """The fragment whose exchange is under way, and its mean; None in its place if that was received already."""
        self.skipped_rounds = 0
        """Number of exchanges that were dropped because some worker's weights were not finite."""

    def _check(self, parameters: Mapping[str, nn.Parameter], fragments: int) -> None:
        check_int("fragments", fragments, 1)
        check_int("overlap", self.overlap, 0)
        if self.every % fragments:
            raise ValueError(f"fragments must divide every: {fragments} does not divide {self.every}")
        if self.overlap >= self.every // fragments:
            raise ValueError(
                f"overlap must be below every / fragments, {self.every // fragments}, not {self.overlap}: a fragment "
                "has to arrive before the next one is sent"
            )
        if self.mix != "keep":
            check_number("mix (or 'keep')", self.mix, low=0, high=1)
        if self.group is None and any(is_sharded(p) for p in parameters.values()):
            raise ValueError("the model is sharded: give group=, the process group of the ranks with the same shards")

    @property
    def interval(self) -> int:
        """Number of inner steps between two exchanges, of whichever fragment."""
        return self.every // len(self._fragments)

    @property
    def steps(self) -> int:
        """Number of inner steps so far."""
        return self._steps

    @property
    def fragments(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each fragment."""
        return [list(fragment.names) for fragment in self._fragments]

    @property
    def peak_bytes(self) -> int:
        """Bytes that this worker sends in the largest exchange, which the link must carry in one burst."""
        return max(self._sent_bytes)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this worker sends in an inner step, on average."""
        return sum(self._sent_bytes) / self.every

    @property
    def _sent_bytes(self) -> list[int]:
        plan, num_workers = self.wire.plan, self.wire.world_size
        return [sent_in_exchange(fragment, plan, num_workers) for fragment in self._fragments]

    def step(self, tokens: int | None = None) -> None:
        """Count an inner step, and exchange a fragment if it is time. Call it after the inner optimizer's step.

        Args:
            tokens: with ``weighted=True``, the amount of data in this worker's step.

        Raises:
            ValueError: ``tokens`` is missing with ``weighted=True``, or given without.
            TransportError, PeerFailedError: an exchange failed.
        """
        with on_the_host():
            self._check_tokens(tokens)
            self._steps += 1
            self._tokens += tokens or 0
            if (self._steps + self.overlap) % self.interval == 0:
                self._send(self._next)
            if self._steps % self.interval == 0:
                self._receive()

    def finish(self) -> None:
        """Exchange what every worker has learned since its last exchange; all workers end with the shared weights.

        Call it once after the last `step`, on every worker. Training may continue afterwards.
        """
        with on_the_host():
            self._receive()
            late = [i for i, fragment in enumerate(self._fragments) if fragment.sent_at != self._steps]
            self._next = 0
            for i in late:
                self._send(i, opens_round=i == late[0])
                self._receive()
            self._next = 0
            for fragment in self._fragments:
                fragment.write(fragment.anchor)

    def _send(self, index: int, *, opens_round: bool | None = None) -> None:
        """Start the exchange of a fragment. All exchanges of a round are buckets of one step of the Wire."""
        assert self._pending is None, "one exchange at a time"
        self._tell_of_frozen()
        if index == 0 if opens_round is None else opens_round:
            self.wire.engine.begin_step()
        fragment = self._fragments[index]
        weights = fragment.read()
        if fragment.sent is not None:
            fragment.sent.copy_(weights)
        mean = fragment.mean = torch.sub(fragment.anchor, weights, out=weights)
        if self.weighted:
            mean.mul_(self._next_share())
        fragment.sent_at = self._steps
        self._pending = index, self.wire.engine.reduce(mean, fragment.layers)
        self._next = (index + 1) % len(self._fragments)

    def _next_share(self) -> float:
        """Return this worker's weight in the mean, 1 on average: its tokens since the last exchange over the mean.

        Where there were none, as for the fragments that `finish` exchanges after another one, the last exchange's
        weight still counts: its tokens are also theirs.
        """
        total = torch.tensor([float(self._tokens)], dtype=torch.float32, device="cpu")
        dist.all_reduce(total, group=self.group)
        if total > 0:
            self._share = self._tokens * self.wire.world_size / float(total)
        self._tokens = 0
        return self._share

    def _receive(self) -> None:
        """Wait for the exchange under way, if there is one, and continue from its result."""
        if self._pending is None:
            return
        index, mean = self._pending
        if mean is not None:
            mean.wait()
        self._pending = None
        applied = self._fragments[index].apply(self.outer, self.mix, self._steps)
        self.skipped_rounds += not applied
        if applied and self._next == 0:
            self._average_buffers()

    def _average_buffers(self) -> None:
        for buffer in self._buffers:
            values = local_values(buffer)
            values.copy_(finite_mean(values, 1.0, partial(dist.all_reduce, group=self.group)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's state, for its own checkpoint, next to the model's and the inner optimizer's.

        Waits for an exchange under way; its result is part of the state. A training that resumes with it, with as many
        workers, continues bit for bit.
        """
        with on_the_host():
            return self._own_state() | {f"wire/{key}": value for key, value in self.wire.state_dict().items()}

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state of all workers merged, on every worker: for one file, written by one rank. Collective.

        Workers that load it, however many, start from the shared weights: what each has learned since its last exchange
        is not in it. Right after an exchange of the whole model (``fragments=1``, ``overlap=0``) nothing is lost.
        """
        with on_the_host():
            gathered = torch.tensor(self.wire.world_size, dtype=torch.int64, device="cpu")
            state = self._own_state() | {"gathered": gathered}
            return state | {f"wire/{key}": value for key, value in self.wire.gather_state_dict().items()}

    def _own_state(self) -> dict[str, Tensor]:
        pending, mean = (-1, None) if self._pending is None else self._pending
        if mean is not None:
            mean.wait()
        counts = {"steps": self._steps, "tokens": self._tokens, "next": self._next, "pending": pending}
        state = {name: torch.tensor(value, dtype=torch.int64, device="cpu") for name, value in counts.items()}
        if self.weighted:
            state["share"] = torch.tensor(self._share, dtype=torch.float64, device="cpu")
        for i, fragment in enumerate(self._fragments):
            state[f"sent_at/{i}"] = torch.tensor(fragment.sent_at, dtype=torch.int64, device="cpu")
            for name, values in fragment.saved(with_mean=i == pending).items():
                state[name] = values.clone()
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, on every worker, after the model's and the inner optimizer's were loaded.

        Warns if the state is of another number of workers, as the learning rate may want another value then.

        Raises:
            ValueError: the state is of another model or of another number of fragments, or was damaged.
            PeerFailedError: the state of another worker is.
            DisagreementError: workers loaded states with other shared weights, as of different runs. Where any of these
                is raised, no worker has changed.
        """
        with on_the_host():
            self._receive()
            with self.wire.fail_together("DiLoCo.load_state_dict()"):
                loaded = self._read(state)
            # Steps, which workers make alone, and the weights that each has sent may differ.
            record = {name: str(getattr(loaded, name)) for name in ("gathered", "pending", "next")}
            shared = {name: value for name, (_, value) in loaded.values.items() if not name.startswith("sent/")}
            self.wire.check_alike(record, shared)
            self.wire.load_state_dict({k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")})
            for fragment, sent_at in zip(self._fragments, loaded.sent_at, strict=True):
                fragment.sent_at = sent_at
            for own, values in loaded.values.values():
                own.copy_(values)
            self._steps, self._tokens, self._next = loaded.steps, loaded.tokens, loaded.next
            self._start()
            # In a merged state all workers have one worker's tokens and share, which are not 1 on average.
            self._share = 1.0 if loaded.gathered else loaded.share
            if loaded.pending >= 0:
                self._pending = loaded.pending, None
            if loaded.gathered:
                if loaded.gathered != (now := self.wire.world_size):
                    warn_caller(
                        f"the state is of {loaded.gathered} workers, and now there are {now}: tune the inner learning "
                        "rate again. The mean of more workers is steadier, and suits a higher one"
                    )
                self._receive()
                for fragment in self._fragments:
                    fragment.write(fragment.anchor)

    def _read(self, state: Mapping[str, Tensor]) -> _LoadedState:
        """Check a state but for the Wire's part. Raises ``ValueError``."""
        check_sealed(state, [k for k in state if not k.startswith("wire/") and k not in ("gathered", "checksums")])
        fragments = range(len(self._fragments))
        sent_at = tuple(int(state_entry(state, f"sent_at/{i}", ())) for i in fragments)
        steps, tokens, following, pending = (
            int(state_entry(state, name, ())) for name in ("steps", "tokens", "next", "pending")
        )
        if f"sent_at/{len(fragments)}" in state or following not in fragments or pending not in (-1, *fragments):
            raise ValueError(f"the state is of another number of fragments than {len(fragments)}")
        gathered = int(state_entry(state, "gathered", ())) if "gathered" in state else 0
        share = float(state_entry(state, "share", ())) if "share" in state else 1.0
        kept: dict[str, Tensor] = {}
        for i, fragment in enumerate(self._fragments):
            kept |= fragment.saved(with_mean=i == pending)
        values = {name: (own, state_entry(state, name, own.shape)) for name, own in kept.items()}
        return _LoadedState(steps, tokens, following, pending, gathered, share, sent_at, values)

    def close(self) -> None:
        """End the exchanges' threads and process groups, after `finish`, on every worker."""
        self._receive()
        self.wire.detach()


@dataclass
class _LoadedState:
    """A state that was checked."""

    steps: int
    tokens: int
    next: int
    pending: int
    """Fragment whose exchange was received and not used, or −1."""
    gathered: int
    """Number of workers whose states were merged; 0 if the state is one worker's own."""
    share: float
    """Weight of this worker in the last exchange."""
    sent_at: tuple[int, ...]
    values: dict[str, tuple[Tensor, Tensor]]
    """Parts of the present outer state, each with its new value."""


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
    algorithm = network.chosen_algorithm(exchange_algorithm(group.size()))
    arguments |= {"algorithm": str(algorithm), "transport": network.transport, "timeout": str(timeout)}
    arguments |= {"streams": str(network.streams)}
    with on_the_host(), agreed_transport(group, timeout, arguments) as host:
        settings = WireSettings(seed=seed, algorithm=algorithm)
        return Wire(BucketEngine(plan, shapes, carried(host, group, network, sums=plan.sums), settings))


_PRESETS = MappingProxyType(
    {
        "local_sgd": {"every": 10, "outer": Nesterov(lr=1.0, momentum=0.0), "compressor": "raw", "feedback": False},
        "diloco": {"every": 100, "compressor": "minmax(bits=4)", "feedback": False},
        "muloco": {"every": 25, "compressor": FEW_BITS},
        "streaming": {"every": 24, "fragments": 4, "overlap": 2, "compressor": "minmax(bits=4)", "feedback": False},
    }
)


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of `DiLoCo` for a known method, with ``changes``.

    ::

        local = thinwire.local.DiLoCo(model, optimizer, **thinwire.local.preset("streaming", every=48))

    - ``"local_sgd"``: average weights in fp32 every 10 steps (Stich 2018, 1805.09767).
    - ``"diloco"``: pseudo-gradients in 4 bits every 100 steps (Douillard et al. 2023, 2311.08105). The outer momentum
      is 0.5, which also suits few exchanges; the paper's is 0.9.
    - ``"muloco"``: 2 bits with error feedback every 25 steps; train with `thinwire.optim.Muon` (2505.23725).
    - ``"streaming"``: four fragments in 4 bits, one every 6 steps, used 2 steps after they were sent (2501.18512).

    Raises:
        ValueError: there is no preset of this name.
    """
    check_choice("preset", name, tuple(_PRESETS))
    return {**_PRESETS[name], **changes}


def send_nothing(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` leave each rank its own gradients, for trainers that wrap every model in DDP.

    It must have no communication hook yet.
    """
    ddp.register_comm_hook(None, _keep)
    _silent.add(ddp)


def _keep(state, bucket):  # without annotations, which DDP would check as objects
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def warn_about_averaged_gradients(ddp: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    """Warn where ``ddp`` averages the gradients of all workers of ``group``, who are to train alone."""
    workers, averaged = (set(dist.get_process_group_ranks(g)) for g in (group, ddp.process_group))
    if len(workers) == 1 or not workers <= averaged or ddp in _silent:
        return
    warn_caller(
        "DistributedDataParallel all-reduces the gradients of all workers in every step, which local updates are to "
        "save: train the module unwrapped, and pass that, or call thinwire.local.send_nothing(model) first. For "
        "workers of a node that average gradients, wrap the model over the node's ranks: process_group="
    )
