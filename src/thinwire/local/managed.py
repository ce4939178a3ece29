"""Local updates among workers that join and leave, in a group that torchft manages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from thinwire.collectives import CommunicationError, ProcessGroupTransport, overwrite, parse_algorithm
from thinwire.compressors import Compressor
from thinwire.local.fragments import FEW_BITS, Fragment, LocalUpdates, Nesterov, exchange_algorithm, state_entry
from thinwire.local.members import Group, Manager, Members
from thinwire.runtime import BucketEngine, Wire, WireSettings, agree, on_the_host
from thinwire.runtime.checkpoint import check_sealed, sealed
from thinwire.runtime.consistency import signed_checksum

_ATTEMPTS = 3
_MOST_ATTEMPTS = 12
"""Largest number of attempts, including those that failed because of another worker, which ends after its own three."""


class ManagedDiLoCo(LocalUpdates):
    """`DiLoCo` for workers that join and leave: torchft decides who takes part in an exchange.

    ::

        group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=20))
        manager = torchft.Manager(pg=group, use_async_quorum=False, ...)
        local = thinwire.local.ManagedDiLoCo(model, optimizer, manager, group, every=25)
        while local.steps < total:
            ...
            local.step()
        local.finish()

    The constructor waits until this worker has the others' shared weights; `steps` is then theirs. What happens when a
    worker dies, joins or is late is in docs/members.md. The whole model is exchanged at once.

    Args:
        model: the module whose trainable parameters are exchanged.
        inner_optimizer: the optimizer that trains it on this worker; it must have all of these parameters.
        manager: the ``torchft.Manager`` of this worker, made with ``use_async_quorum=False``.
        group: the ``torchft.ProcessGroupGloo`` that the manager was made with.
        every, outer, compressor, feedback, seed, outer_device, total_steps: as for `DiLoCo`.
        weighted: weight workers by the tokens that they say with ``step(tokens=...)``.

    Raises:
        ValueError: an argument is outside its range, or the optimizer lacks a parameter.
        TypeError: the parameters are not floating point, ``outer`` is no `Nesterov`, or ``group`` is not torchft's.
        DisagreementError: workers gave different arguments.
        CommunicationError: this worker cannot join the others: three attempts have failed, other than those that failed
            because nobody can connect to another one.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        manager: Manager,
        group: Group,
        *,
        every: int = 25,
        outer: Nesterov | None = None,
        compressor: str | Compressor = FEW_BITS,
        feedback: bool = True,
        weighted: bool = False,
        seed: int = 0,
        outer_device: torch.device | str | None = None,
        total_steps: int | None = None,
    ) -> None:
        if not hasattr(type(group), "parent"):
            raise TypeError(f"group must be the torchft.ProcessGroupGloo of the manager, not {group!r}")
        options = {"every": every, "outer": outer, "weighted": weighted, "total_steps": total_steps}
        super().__init__(model, inner_optimizer, compressor, feedback=feedback, **options)
        device = None if outer_device is None else torch.device(outer_device)
        self._fragment = Fragment(self._parameters, False, device, self.outer.dtype, self._gathering())
        self._fragments = [self._fragment]
        self._steps = 0
        self._rounds = 0
        """Number of exchanges whose means are in the shared weights."""
        self._last_exchange = 0
        """Number that identifies the last of those exchanges."""
        self._work = 0
        """Inner steps, or tokens, of this worker that are in no exchange."""
        self._unsettled: tuple[int, Tensor, int] | None = None
        """Number, sent weights and work of an exchange that failed here: it may have succeeded on others."""
        self.skipped_rounds = 0
        """Number of exchanges that were dropped because some worker's weights were not finite."""
        arguments = {"every": str(every), "outer": str(self.outer), "weighted": str(weighted)}

        def open_wire(transport: ProcessGroupTransport) -> Wire:
            # Each set of workers has a number of its own, or draws would repeat.
            with on_the_host():
                agree(arguments | {"round": str(self._rounds)}, transport)
                own_seed = (seed + self._rounds) % 2**63
                algorithm = parse_algorithm(exchange_algorithm(transport.world_size))
                settings = WireSettings(seed=own_seed, algorithm=algorithm)
                return Wire(BucketEngine(self._plan, self._shapes, transport, settings))

        self.members = Members(manager, group, open_wire=open_wire, save=self.state_dict, load=self._take_shared_state)
        """Workers that take part: ``members.names``, and counts of workers that ``came`` and ``left``."""
        self._join()

    def _join(self) -> None:
        """Take the others' shared weights, in an exchange to which this worker has nothing to add."""
        failed = own = 0
        while own < _ATTEMPTS and failed < _MOST_ATTEMPTS:
            if self._exchange():
                return
            failed += 1
            own += not self.members.excused
        raise CommunicationError(
            f"this worker could not join the others in {failed} attempts; the last one: {self.members.failure}. "
            "Workers have to be able to connect to each other in both directions: none may be behind NAT, or behind a "
            "firewall that only lets connections out"
        )

    @property
    def wire(self) -> Wire:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Handle of the exchanges among the present workers: ``wire.stats``, ``wire.plan``."""
        return self.members.wire

    @property
    def steps(self) -> int:
        """Number of inner steps so far, of the worker that has trained longest in this training."""
        return self._steps

    def step(self, tokens: int | None = None) -> None:
        """Count an inner step, and exchange if it is time. Call it after the inner optimizer's step.

        An exchange that fails is left out: this worker continues from its weights, and what it has learned is part of
        its next exchange.

        Args:
            tokens: with ``weighted=True``, the amount of data in this worker's step.

        Raises:
            ValueError: ``tokens`` is missing with ``weighted=True``, or given without.
            Exception: torchft's lighthouse does not answer, or not enough workers are there in time.
        """
        self._check_tokens(tokens)
        self._steps += 1
        self._work += 1 if tokens is None else tokens
        if self._steps % self.every == 0:
            self._exchange()

    def finish(self) -> None:
        """Exchange what has been learned since the last exchange, until that succeeds with the present workers.

        Call it once after the last `step`, on every worker: all of them end with the shared weights.
        """
        while self._work and not self._exchange():
            pass

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that all workers share after an exchange, without residuals: one saves it, and all load it.

        torchft copies it to workers that lack it.
        """
        counts = {"rounds": self._rounds, "exchange": self._last_exchange, "steps": self._steps}
        with on_the_host():
            state = {name: torch.tensor(value, dtype=torch.int64, device="cpu") for name, value in counts.items()}
            return sealed(state | {name: value.detach().clone() for name, value in self._shared().items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, on every worker, after the model's and the inner optimizer's were loaded.

        Raises:
            ValueError: the state is of another model, or was damaged; nothing was changed.
        """
        self._load(state)
        self._work, self._unsettled = 0, None
        self._fragment.write(self._fragment.anchor)

    def close(self) -> None:
        """End the exchanges' threads and connections, after `finish`."""
        self.wire.detach()

    def _exchange(self) -> bool:
        """Exchange the model with the present workers; return whether the exchange counts.

        One that fails changes nothing here. It may have succeeded on another worker. Then all of this worker's message
        was in it, for nobody has the mean without everybody's message, and `_take_shared_state` brings the result.
        """
        self._tell_of_frozen()
        self.members.start_quorum()
        if self._unsettled is not None:
            self.wire.engine.discard_step()
            self._unsettled = None
        fragment, number, buffers = self._fragment, 0, []
        weights = fragment.read()
        mean = fragment.mean = fragment.anchor - weights
        try:
            work = self._work if self.weighted else int(self._work > 0)
            shared = signed_checksum(fragment.anchor.cpu()) ^ signed_checksum(fragment.momentum.cpu())
            share, number, self._steps = self.members.meet(work, shared, self._steps)
            mean.mul_(share)
            self.wire.engine.begin_step()
            self._unsettled = number, weights, self._work
            self.wire.engine.reduce(mean, fragment.layers).wait()
            buffers = self.members.average(self._buffers, share)
        except CommunicationError as error:
            self.members.give_up(error)
        if not self.members.commit():
            return False
        self._unsettled = None
        self._rounds, self._last_exchange, self._work = self._rounds + 1, number, 0
        if not fragment.apply(self.outer, "keep", self._steps):
            self.skipped_rounds += 1
            return True
        for buffer, mean in zip(self._buffers, buffers, strict=True):
            overwrite(buffer, mean)
        return True

    def _take_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the shared state of other workers, which have made exchanges that this one has not.

        What this worker has learned since its last exchange goes into the next one if it has missed one at most, and is
        dropped if it was away for longer. Where the one it missed has its message, only what came later is left.
        """
        fragment, rounds = self._fragment, self._rounds
        weights, base = fragment.read(), fragment.anchor.clone()
        self._load(state)
        if self._unsettled is not None and self._unsettled[0] == self._last_exchange:
            _, base, sent = self._unsettled
            self._unsettled, self._work = None, self._work - sent
        elif self._rounds > rounds + 1:
            base, self._work = weights, 0
        fragment.write(fragment.anchor + (weights - base))

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Load a shared state, but for the worker's own weights; nothing of it if it raises ``ValueError``."""
        check_sealed(state, [key for key in state if key != "checksums"])
        rounds, number, steps = (int(state_entry(state, name, ())) for name in ("rounds", "exchange", "steps"))
        values = [(own, state_entry(state, name, own.shape)) for name, own in self._shared().items()]
        for own, value in values:
            overwrite(own, value)
        self._rounds, self._last_exchange, self._steps = rounds, number, steps
        self._start()

    def _shared(self) -> dict[str, Tensor]:
        """Return the tensors that are equal on all workers."""
        buffers = {f"buffer/{i}": buffer for i, buffer in enumerate(self._buffers)}
        return buffers | self._fragment.saved(with_mean=False)
