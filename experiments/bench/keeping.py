"""``python -m experiments bench keeping``: messages of samples, cluster centres, or nothing, at equal bits."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from experiments.papers.aqsgd import tasks
from experiments.papers.aqsgd.stages import Part, build
from experiments.papers.fullstack.tasks import ONLINE, ONLINE_SMOKE
from thinwire.pipeline.boundary import UNSEEN, BoundarySide
from thinwire.pipeline.message import BoundaryTensors, Direction, Spec
from thinwire.pipeline.options import PipelineOptions
from thinwire.pipeline.schedule_step import Batch, ScheduleStep
from thinwire.pipeline.stats import PipelineStats
from thinwire.store import Background, Centres, Memory, Place
from thinwire.threads import Worker
from thinwire_tools.compare.gpt import GPT, next_token_loss
from thinwire_tools.results import OutputFile, Results

_BITS = 2
_BACKWARD = "maxabs(bits=6)"
FP32, CONTROL = "FP32", "direct, 2 bits at random"


@dataclass(frozen=True)
class Method:
    """How activations and their gradients are sent, and what both sides keep."""

    forward: str
    backward: str = _BACKWARD
    store: Place | None = None


METHODS = {FP32: Method("raw", "raw"), CONTROL: Method("maxabs(bits=2, rounding=stochastic)")}
_CODER = f"gaussian(bits={_BITS})"
METHODS[f"direct, {_BITS} bits"] = Method(_CODER)
METHODS[f"messages of samples, {_BITS} bits"] = Method(f"delta({_CODER})", store=Memory())
METHODS[f"256 centres, {_BITS} bits"] = Method(f"delta({_CODER})", store=Centres())
METHODS[f"16 centres, {_BITS} bits"] = Method(f"delta({_CODER})", store=Centres(num=16))


def keeping(*, seeds: int = 3, smoke: bool = False, json: OutputFile = None) -> int:
    """Train a GPT of two stages, for five epochs and for one, with changes taken from what both sides keep.

    The two stages are in one process; what crosses goes through both sides of a compressed boundary, as bytes. Messages
    of samples (AQ-SGD) take memory for each sample, centres (appendix G) do not; nothing is kept for what is sent
    directly. The control, three levels rounded at random, must be worse than all. The bytes include first visits, and
    the centres' indices.

    Examples:
      python -m experiments bench keeping
      python -m experiments bench keeping --seeds 1 --json keeping.json

    Args:
        seeds: trainings of each method.
        smoke: a tiny model and few steps: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    trained = {"five epochs": tasks.SMALL, "one epoch": ONLINE}
    if smoke:
        trained = {"five epochs": tasks.SMALL_SMOKE, "one epoch": ONLINE_SMOKE}
    results = Results("python -m experiments bench keeping", about={"seeds": seeds, "smoke": smoke})
    table = Table("", "kept", "loss", "held out", "±", "fewer bytes", "kept bytes")
    with console.status("training ...") as status:
        for title, task in trained.items():
            begun = first(task)
            exact: list[_Run] = []
            for name, method in METHODS.items():
                status.update(f"{title}: {name}")
                runs = [_train(task, begun, method, seed) for seed in range(seeds)]
                exact = exact or runs
                pairs = list(zip(runs, exact, strict=True))
                held_out = [run.held_out / base.held_out - 1 for run, base in pairs]
                figures = {
                    "loss": fmean(run.loss / base.loss - 1 for run, base in pairs),
                    "held_out": fmean(held_out),
                    "deviation": stdev(held_out) if seeds > 1 else 0.0,
                    "fewer": fmean(base.sent_bytes / run.sent_bytes for run, base in pairs),
                    "kept_bytes": float(runs[0].kept_bytes),
                }
                for figure, value in figures.items():
                    results.add(f"{title}/{figure}/{name}", value, "B" if figure == "kept_bytes" else "")
                loss, out, deviation, fewer, kept = figures.values()
                table.add_row(
                    title, name, f"{loss:+.2%}", f"{out:+.2%}", f"{deviation:.2%}", f"{fewer:.1f}x", f"{kept:.0f}"
                )
    console.print(table)
    if json:
        results.write(json)
    return 0


@dataclass(frozen=True)
class _Run:
    loss: float
    """The mean of the last epoch, or of the only one's last quarter."""
    held_out: float
    sent_bytes: int
    """Of activations."""
    kept_bytes: int


class Sent(Protocol):
    """How a boundary's messages are sent."""

    @property
    def forward(self) -> str: ...
    @property
    def backward(self) -> str: ...
    @property
    def store(self) -> Place | None: ...


class Pair:
    """Both sides of a boundary in one process."""

    def __init__(self, method: Sent, shape: tuple[int, ...], seed: int) -> None:
        self._options = PipelineOptions(method.forward, method.backward, method.store or Memory(), seed=seed)
        self._beside = Worker("thinwire pipeline")
        self.stats = PipelineStats()
        self._sides = [BoundarySide(0, earlier, self._options, self.stats, self._beside) for earlier in (True, False)]
        self._tensors = BoundaryTensors((Spec(shape, torch.float32),))
        self._step = 0

    def begin(self, ids: Tensor, corners: Tensor | None = None) -> None:
        """Begin a step with these samples."""
        batch = Batch.from_ids(ids, None, None, (), corners)
        step = ScheduleStep(self._step, self._step, True, 1, batch)
        self._step += 1
        self._beside.wait()
        for side in self._sides:
            side.set_up(step, 1, self._tensors, self._tensors)
            if side.keeps and side.store is None:
                store, background = self._options.store, Background()
                side.store = store.open(side.record_format(), side.name, run=1, background=background)
        if self._sides[0].keeps:
            one, other = (side.local_view(batch.samples, compare=False) for side in self._sides)
            for side in self._sides:
                side.decide_encodings(batch.samples, [a == b != UNSEEN for a, b in zip(one, other, strict=True)])

    def send(self, direction: Direction, x: Tensor) -> Tensor:
        """What arrives of activations, or of their gradients."""
        sender, receiver = self._sides if direction == "forward" else reversed(self._sides)
        message, arrived = sender.message(direction, 0), torch.empty_like(x)
        sender.prepare(direction, 0, [x])
        self._beside.submit(lambda: sender.pack(direction, 0, [x], message)).result()
        self._beside.submit(sender.keep).result()
        receiver.unpack(direction, 0, message, [arrived], 0)
        return arrived

    @property
    def kept_bytes(self) -> int:
        """Of one side."""
        self._beside.wait()
        store = self._sides[0].store
        return 0 if store is None else store.num_bytes


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Pair) -> Tensor:
        ctx.pair = pair
        return pair.send("forward", x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.pair.send("backward", gradients[0]), None


def first(task: tasks.FineTuning) -> GPT:
    """The network that fine-tunings start from."""
    gpt = build(task, None)
    for _ in task.first.first_training(gpt):
        pass
    return gpt


def _train(task: tasks.FineTuning, begun: GPT, method: Method, seed: int) -> _Run:
    gpt = deepcopy(begun)
    parts = nn.ModuleList(Part(gpt, index, 2, half="") for index in range(2))
    optimizer = task.optimizer(parts)
    pair = Pair(method, (task.batch, task.model.context, task.model.width), seed)
    losses: list[float] = []
    for ids in (ids for epoch in range(task.epochs) for ids in task.order(seed, epoch)):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(len(losses))
        x, y = task.tuned_on(ids)
        pair.begin(ids)
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(parts[1](_Cut.apply(parts[0](x), pair)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [float(next_token_loss(parts[1](parts[0](x)), y)) for x, y in task.held_out()]
    last = losses[-(task.steps_per_epoch if task.epochs > 1 else max(1, len(losses) // 4)) :]
    return _Run(fmean(last), fmean(held_out), pair.stats.forward_sent_bytes, pair.kept_bytes)
