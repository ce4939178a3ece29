"""One rank of a training with a fault that is drawn from a seed: it trains, fails if it is the victim, and reports."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

FAULTS = ("kill", "stop", "interrupt", "terminate", "hang", "raise", "exit", "sockets")
"""SIGKILL; SIGSTOP; SIGINT, as of Ctrl-C; SIGTERM; a rank that sleeps for ever; an exception in the script; an end
without a word; all its TCP sockets shut down."""
PHASES = ("compress", "forward", "backward", "between", "checkpoint")
"""Before `thinwire.compress`; in the forward pass; among the buckets of a backward pass; between two steps; before
`gather_state_dict`, which the others have begun."""
STEPS = 4


@dataclass(frozen=True)
class Training:
    """What is trained, and how its messages are sent."""

    attachment: str
    """``ddp``, ``dense`` (compression starts later than the training ends), ``fsdp``, ``pipeline``, or ``stock``: DDP
    without thinwire."""
    spec: str
    transport: str
    num_ranks: int = 3


TRAININGS = (
    *(
        Training("ddp", spec, transport)
        for spec in ("minmax(bits=4)", "ef(minmax(bits=2))", "powersgd(rank=2)", "topk(density=0.1)")
        for transport in ("shared", "group")
    ),
    *(Training("dense", "minmax(bits=4)", transport) for transport in ("shared", "group")),
    *(
        Training("fsdp", spec, transport)
        for spec in ("minmax(bits=8)", "minmax(bits=4)")
        for transport in ("shared", "group")
    ),
    *(Training("pipeline", spec, "group") for spec in ("maxabs(bits=4)", "maxabs(bits=8)")),
)


@dataclass(frozen=True)
class Scenario:
    """A training, and what happens to one of its ranks."""

    training: Training
    timeout_s: float
    fault: str = ""
    """One of `FAULTS`; none at all if empty."""
    phase: str = ""
    victim: int = -1
    step: int = -1


def draw(seed: int, number: int, timeout_s: float) -> tuple[Scenario, Scenario]:
    """The scenario of a number, and its control: the same fault in stock DDP."""
    random_ = random.Random(f"{seed} {number}")
    training = random_.choice(TRAININGS)
    phases = [
        p for p in PHASES if training.attachment in ("ddp", "dense", "fsdp") or p not in ("compress", "checkpoint")
    ]
    what = {
        "fault": random_.choice(FAULTS),
        "phase": random_.choice(phases),
        "victim": random_.randrange(training.num_ranks),
        "step": random_.randrange(1, STEPS - 1),
    }
    control = Training("stock", "", "group", training.num_ranks)
    return Scenario(training, timeout_s, **what), Scenario(control, timeout_s, **what)


_WIDTH, _BATCH = 64, 8
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


def main(scenario: Scenario, rank: int, port: int, folder: str, pipe: Connection) -> None:
    """Train as ``scenario`` says. What happens goes through ``pipe``, one JSON object a message."""
    # A shell starts what runs in the background with SIGINT ignored, and so would its descendants.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # PyTorch writes the stack of every lost connection.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank_ = _Rank(scenario, rank, Path(folder), pipe)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=scenario.training.num_ranks,
            timeout=timedelta(seconds=60),
        )
        rank_.train()
        rank_.tell(outcome="finished")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is what is judged
        rank_.failed(error)
        # What the interpreter notes of an exception that ends a program.
        sys.last_value = error
    # A child of a fork server would leave without what a program does at its end.
    atexit._run_exitfuncs()
    rank_.tell(ended=True)
    os._exit(0)


class _Rank:
    def __init__(self, scenario: Scenario, rank: int, folder: Path, pipe: Connection) -> None:
        self.scenario, self.rank, self._folder, self._pipe = scenario, rank, folder, pipe
        self._present = -1
        self._save: Callable[[], dict[str, Tensor]] | None = None
        self._models: list[nn.Module] = []

    def tell(self, **what: Any) -> None:
        self._pipe.send_bytes(json.dumps({"at": time.monotonic(), **what}).encode())

    def failed(self, error: BaseException) -> None:
        """Say what was met, and whether a checkpoint can be written afterwards."""
        named = getattr(error, "rank", None)
        self.tell(outcome="error", kind=type(error).__name__, text=f"{error}"[:300], rank=named)
        if self._save is None:
            return
        try:
            torch.save(self._save(), self._folder / f"rank{self.rank}.pt")
            torch.load(self._folder / f"rank{self.rank}.pt", weights_only=True)
            self.tell(saved=True)
        except Exception:  # noqa: BLE001 - it is what is judged
            self.tell(saved=False)

    # The fault.

    def reach(self, phase: str) -> None:
        """Strike if the fault is to happen here."""
        s = self.scenario
        if (s.victim, s.phase) == (self.rank, phase) and self._present in (s.step, -1):
            self.tell(struck=True)
            self._strike(s.fault)

    def _strike(self, fault: str) -> None:
        if fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault])
        elif fault == "hang":
            time.sleep(3600.0)
        elif fault == "exit":
            os._exit(0)
        elif fault == "raise":
            raise ArithmeticError("a fault in the script")
        elif fault == "sockets":
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        _shut(int(name))

    # The training.

    def train(self) -> None:
        kind = self.scenario.training.attachment
        step = {"fsdp": self._fsdp, "pipeline": self._pipeline}.get(kind, self._ddp)()
        for present in range(STEPS):
            self._present = present
            step(present)
            self.tell(step=present, digest=self._digest())
            self.reach("between")
        if self.scenario.phase == "checkpoint":
            self._present = self.scenario.step
            self.reach("checkpoint")
            self._gather()

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for model in self._models:
            for parameter in model.parameters():
                value: Any = parameter.detach()
                value = value.to_local() if hasattr(value, "to_local") else value
                digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _network(self) -> thinwire.Network:
        transport: Any = self.scenario.training.transport
        return thinwire.Network(transport=transport, timeout=timedelta(seconds=self.scenario.timeout_s))

    def _ddp(self) -> Callable[[int], None]:
        training = self.scenario.training
        group = dist.new_group(timeout=timedelta(seconds=self.scenario.timeout_s))
        model = DistributedDataParallel(_network(), bucket_cap_mb=0.02, process_group=group)
        self.reach("compress")
        if training.attachment != "stock":
            start = 10 * STEPS if training.attachment == "dense" else 0
            options = {"network": self._network(), "start": start, "skip_if_slower": False}
            wire = thinwire.compress(model, training.spec, **options)
            self._save, self._gather = wire.state_dict, wire.gather_state_dict
        return self._steps(model, list(model.parameters())[4])

    def _fsdp(self) -> Callable[[int], None]:
        from torch.distributed.fsdp import fully_shard

        model = _network()
        for layer in list(model)[::2]:
            fully_shard(layer)
        fully_shard(model)
        self.reach("compress")
        spec = self.scenario.training.spec
        options = {"network": self._network(), "skip_if_slower": False}
        wire = thinwire.compress(model, weights=spec, gradients=spec, **options)
        self._save, self._gather = wire.state_dict, wire.gather_state_dict
        return self._steps(model, None)

    def _steps(self, model: nn.Module, watched: nn.Parameter | None) -> Callable[[int], None]:
        self._models = [model]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watched is not None:
            watched.register_hook(lambda gradient: self.reach("backward"))

        def step(present: int) -> None:
            x = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(100 * present + self.rank))
            self.reach("forward")
            y = model(x)
            if watched is None:
                y.register_hook(lambda gradient: self.reach("backward"))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _pipeline(self) -> Callable[[int], None]:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        # Stages have the timeout of their process group.
        group: Any = dist.new_group(timeout=timedelta(seconds=self.scenario.timeout_s))
        module = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU())
        last = self.rank == self.scenario.training.num_ranks - 1
        module.register_full_backward_pre_hook(lambda *_: self.reach("backward"))
        self._models = [module]
        stage = PipelineStage(module, self.rank, self.scenario.training.num_ranks, torch.device("cpu"), group=group)
        spec = self.scenario.training.spec
        stage = thinwire.compress_stage(stage, forward=spec, backward=spec)
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self._save = stage.state_dict

        def step(present: int) -> None:
            x = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(present))
            self.reach("forward")
            schedule.step(*([x] if self.rank == 0 else []), target=x if last else None)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _gather(self) -> object:
        """What a checkpoint is made of, by all ranks: for stock DDP a barrier, as scripts have one."""
        return dist.barrier()


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) if i % 2 == 0 else nn.ReLU() for i in range(7)))


def _shut(number: int) -> None:
    """Shut a TCP connection down; what is no TCP connection is left alone."""
    with socket.socket(fileno=os.dup(number)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.shutdown(socket.SHUT_RDWR)
