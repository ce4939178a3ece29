"""One rank of ``python -m experiments bench members``, inside a lab: rank 0 is what workers meet at, the others train.

Every worker appends a line of JSON to a file of its own in ``folder`` after each exchange, or each checkpoint, and one
of them saves the weights now and then. They are evaluated when the run is over.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire_tools.compare.tasks import GPTTask

LIGHTHOUSE_PORT, STORE_PORT = 29510, 29400
MIN_WORKERS = 2
WARM_UP_STEPS = 20
_PR_SET_PDEATHSIG = 1


@dataclass
class Worker:
    """A model that takes ``step_s`` a step, as if an accelerator computed it, and notes what it has kept."""

    config: dict[str, Any]
    rank: int
    """The rank in the lab, from 1: it stays the same when the worker comes again."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.folder = Path(self.config["folder"])
        self.life = len(list(self.folder.glob(f"worker{self.rank}.*.jsonl")))
        self.task = GPTTask.from_json(self.config["task"])
        self.model = self.task.build(self.config["seed"])
        self.optimizer = self.task.optimizer(self.model)
        self.tokens = self.task.batch * self.task.model.context
        self.seconds = {"starting": 0.0, "joining": 0.0, "waiting_for_a_core": 0.0, "exchanging": 0.0}
        """What its time was spent on since the last note, beside steps of ``step_s``."""
        self._notes = (self.folder / f"worker{self.rank}.{self.life}.jsonl").open("w", buffering=1)
        self._batches = self._endless_batches()

    def _endless_batches(self) -> Iterator[Any]:
        """Batches that no other worker has, nor this one in its former lives."""
        for draw in range(1000):
            number = 1_000_000 * self.config["seed"] + 1000 * self.life + draw
            yield from self.task.batches(number, self.rank - 1, self.config["workers"])

    def train_step(self, step: int, model: nn.Module) -> None:
        started = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        self.optimizer.zero_grad()
        self.task.loss(model, next(self._batches)).backward()
        self.optimizer.step()
        time.sleep(max(0.0, self.config["step_s"] - (time.monotonic() - started)))
        self.seconds["waiting_for_a_core"] += time.monotonic() - started - self.config["step_s"]

    def note(self, step: int, kept: int, *, save: bool, **more: Any) -> None:
        """Record tokens that are in a state which outlives this worker, and what that state is."""
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        line = {"step": step, "kept": kept, "weights": f"{zlib.crc32(weights.numpy().tobytes()):08x}", **more}
        if save:
            torch.save(weights, self.folder / f"{line['weights']}.pt")
        self._notes.write(json.dumps({**line, "seconds": self.seconds}) + "\n")
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        sys.stdout.write(f"kept {kept} tokens\n")


def seconds_of_this_process() -> float:
    """How long ago the kernel made this process: the start of Python and its imports are in it."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def managed(config: dict[str, Any]) -> None:
    """Local updates in torchft's groups."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    worker = Worker(config, int(os.environ["RANK"]))
    host = socket.gethostname()
    store = dist.TCPStore(host, 0, wait_for_workers=False, is_master=True)  # pyright: ignore[reportPrivateImportUsage]
    group = ProcessGroupGloo(timeout=timedelta(seconds=20))
    manager = Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=MIN_WORKERS,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(minutes=5),
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
    )
    every = config["every"]
    worker.seconds["starting"] = seconds_of_this_process()
    began = time.monotonic()
    local = thinwire.local.ManagedDiLoCo(
        worker.model,
        worker.optimizer,
        manager,
        group,
        every=every,
        weighted=True,
        outer=thinwire.local.Nesterov(1.0, 0.0),
        seed=config["seed"],
    )
    worker.seconds["joining"] = time.monotonic() - began
    since = 0
    while True:
        worker.train_step(local.steps, worker.model)
        since += worker.tokens
        exchanges, began = manager.current_step(), time.monotonic()
        local.step(tokens=worker.tokens)
        worker.seconds["exchanging"] += time.monotonic() - began
        if manager.current_step() > exchanges:
            names = local.members.names
            save = local.steps % config["save_every"] == 0 and f"(process {os.getpid()} " in names[0]
            worker.note(local.steps, since, save=save, workers=len(names), failed=local.members.failed)
            since = 0
        elif local.steps % every == 0:
            worker.note(local.steps, 0, save=False, workers=0, failed=local.members.failed)


def synchronous(config: dict[str, Any]) -> None:
    """DDP with compressed gradients, which torchrun starts anew from the last checkpoint whenever a worker dies."""
    # A lab ends torchrun alone, which keeps its worker in a session of its own.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = Worker(config, config["lab_rank"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = worker.task.distribute(worker.model)
    wire = thinwire.compress(model, "4bit", skip_if_slower=False)
    path, step = worker.folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        worker.model.load_state_dict(state["model"])
        worker.optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        step = state["step"]
    while True:
        worker.train_step(step, model)
        step += 1
        if step % config["save_every"] == 0:
            gathered = wire.gather_state_dict()
            if dist.get_rank() == 0:
                state = {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()}
                torch.save({**state, "wire": gathered, "step": step}, path.with_suffix(".part"))
                path.with_suffix(".part").replace(path)
            worker.note(step, config["save_every"] * worker.tokens, save=dist.get_rank() == 0)


def meeting_place(config: dict[str, Any]) -> None:
    """What outlives every worker: the lighthouse, or the store at which torchruns meet."""
    if config["mode"] == "managed":
        from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

        held: Any = LighthouseServer(
            bind=f"[::]:{LIGHTHOUSE_PORT}",
            min_replicas=MIN_WORKERS,
            join_timeout_ms=config["join_timeout_ms"],
            heartbeat_timeout_ms=config["heartbeat_timeout_ms"],
        )
    else:
        held = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "0.0.0.0", STORE_PORT, is_master=True, wait_for_workers=False
        )
    while held:
        time.sleep(1.0)


def torchrun(config: dict[str, Any]) -> int:
    """Start torchrun for the worker of this rank of the lab."""
    rank, head = os.environ["RANK"], os.environ["MASTER_ADDR"]
    config = config | {"mode": "worker of torchrun", "lab_rank": int(rank)}
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", str(config["workers"])]
    argv += ["--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{STORE_PORT}"]
    argv += ["--rdzv-id", "job", "--rdzv-conf", "is_host=0", "--local-addr", os.uname().nodename]
    return subprocess.run([*argv, "-m", "experiments.bench.members_rank", json.dumps(config)], check=False).returncode


def main() -> int:
    config = json.loads(sys.argv[1])
    if config["mode"] == "worker of torchrun":
        synchronous(config)
    elif os.environ["RANK"] == "0":
        meeting_place(config)
    elif config["mode"] == "managed":
        managed(config)
    else:
        return torchrun(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
