"""``python -m experiments bench masks``: one sparse mask for all workers, beside a mask of each worker's own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments.bench.training import best_of, bracket
from thinwire.compressors import TopK
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.compare.tasks import BETAS, WEIGHT_DECAY, GPTTask
from thinwire_tools.compare.train import learning_rate
from thinwire_tools.results import OutputFile, Results

_EPS = 1e-8
_LEAST = 1024
"""Smaller layers are sent whole, as by `thinwire.compress`."""
_SHARD = 64
"""Elements of a shard, of which one worker draws up the mask."""


@dataclass(frozen=True)
class Method:
    """A way to train. ``sent``: "gradients" of all elements, under ``optimizer``; "updates": of AdamW on each worker,
    with error feedback; "momenta": of AdamS, those that are not sent stay with their workers.

    ``masks`` are of the ``density`` largest of what is to be sent: each worker's "own"; or one for all, by the "mean"
    over workers, which no worker knows; or by "owners", of whom each has a shard; or of the "known", the moving average
    of what was received, with a tenth drawn at random. ``late``: by what there was one step before.
    """

    name: str
    sent: str
    optimizer: str = "AdamW"
    masks: str = ""
    density: float = 1.0
    late: bool = False


REFERENCE = "AdamW, fp32"
METHODS = (
    Method(REFERENCE, "gradients"),
    Method("alone", "gradients"),
    Method("AdamS, fp32", "gradients", "AdamS"),
    Method("updates, each worker's own mask", "updates", masks="own", density=0.01),
    Method("updates, one mask of the mean", "updates", masks="mean", density=0.0128),
    Method("updates, one mask of owners", "updates", masks="owners", density=0.0128),
    Method("updates, one mask of owners, late", "updates", masks="owners", density=0.0128, late=True),
    Method("updates, one mask of what is known, late", "updates", masks="known", density=0.0178, late=True),
    Method("momenta of AdamS, one mask of owners, late", "momenta", "AdamS", "owners", 0.0128, True),
    Method("momenta of AdamS, one mask of owners, late, 10 %", "momenta", "AdamS", "owners", 0.1, True),
)


def masks(
    *,
    workers: int = 2,
    steps: int = 300,
    seeds: int = 3,
    rate: float = 4e-3,
    methods: tuple[str, ...] = (),
    jobs: int = 2,
    json: OutputFile = None,
) -> int:
    """Train a small GPT with one sparse mask for all workers, after SCAPE, and with masks of each worker's own.

    With one mask, sums of sparse updates are exact, and fewer indices are sent. SCAPE (2607.01678) takes it from first
    moments, one step late. Workers are simulated in one process, their messages counted. Learning rates are doubled and
    halved with the first seed until the best lies between two others.

    Examples:
      python -m experiments bench masks --json benchmarks/masks.json
      python -m experiments bench masks --workers 8 --seeds 1

    Args:
        workers: simulated workers.
        steps: training steps of 4 windows of 64 bytes a worker.
        seeds: runs of each method: initial weights and batches.
        rate: the learning rate to begin with.
        methods: only those whose names contain one of these words.
        jobs: methods at a time, each in a process of one thread.
        json: write the figures to this file.
    """
    task = GPTTask(model=GPTConfig(width=64, layers=2, context=64), steps=steps, batch=4, held_out_windows=2048)
    results = Results("python -m experiments bench masks")
    results.about = {"workers": workers, "steps": steps, "seeds": seeds, "task": asdict(task)}
    chosen = [m for m in METHODS if m.name == REFERENCE or not methods or any(word in m.name for word in methods)]
    console, losses = Console(highlight=False), dict[str, list[float]]()
    one_thread = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        for method, found in zip(chosen, pool.map(partial(measure, task, workers, seeds, rate), chosen), strict=True):
            losses[method.name] = found.losses
            loss, by_rate = fmean(found.losses), {str(each): lost for each, lost in found.by_rate.items()}
            results.add(f"loss/{method.name}", loss, "nats/byte", lr=found.rate, losses=found.losses, by_rate=by_rate)
            results.add(f"sent_bytes/{method.name}", found.sent_bytes, "B/step")
            differences = relative_differences(found.losses, losses[REFERENCE])
            if len(differences) > 1 and method.name != REFERENCE:
                both = estimate(differences)
                results.add(f"difference/{method.name}", both.mean, "", lower=both.lower, upper=both.upper)
            against = f"lr {found.rate:g}, {found.sent_bytes:,.0f} bytes a step, {fmean(differences):+.2%}"
            console.print(f"{method.name}: {against}, {loss:.4f}")
            if json is not None:
                results.write(json)
    return 0


@dataclass(frozen=True)
class Found:
    """Held-out losses of all seeds at the best learning rate, those of the first at each, and bytes of a step."""

    rate: float
    losses: list[float]
    by_rate: dict[float, float]
    sent_bytes: float


def measure(task: GPTTask, workers: int, seeds: int, rate: float, method: Method) -> Found:
    """Train by a method at learning rates around ``rate`` and, at the best, from all seeds."""
    tried = bracket(partial(train, method, task, workers, 0), (rate,))
    best = best_of(tried)
    runs = [tried[best], *(train(method, task, workers, seed, best) for seed in range(1, seeds))]
    by_rate = {each: tried[each]["loss"] for each in sorted(tried)}
    return Found(best, [run["loss"] for run in runs], by_rate, runs[0]["sent_bytes"])


def train(method: Method, task: GPTTask, workers: int, seed: int, rate: float) -> dict[str, float]:
    """Train by a method from ``seed``; the held-out loss, and bytes that a worker sends in a step."""
    count = 1 if method.name == "alone" else workers
    model = task.build(seed)
    layers = Layers(model)
    batches = [task.batches(seed, rank, workers) for rank in range(count)]
    step: _Step = {"gradients": _Dense, "updates": _Updates, "momenta": _Momenta}[method.sent](
        method, layers, count, seed
    )
    gradients = torch.empty(count, layers.numel)
    for index in range(task.steps):
        lr = learning_rate(rate, index, task.steps)
        for gradient, own in zip(gradients, batches, strict=True):
            layers.gradient.zero_()
            task.loss(model, next(own)).backward()
            gradient.copy_(layers.gradient)
        layers.weights.mul_(1 - lr * WEIGHT_DECAY).sub_(step(gradients, lr))
    model.eval()
    with torch.no_grad():
        total, terms = task.evaluate(model, 0, 1, probe=False)
    return {"loss": total / terms, "sent_bytes": sent_bytes(method, layers, count)}


def sent_bytes(method: Method, layers: Layers, workers: int) -> float:
    """What a worker sends in a step: fp32 values in a ring, or messages with their indices to all others."""
    once, ring = workers - 1, 2 * (workers - 1) / workers
    if method.sent == "gradients":
        return 4 * layers.numel * ring
    chosen = TopK(method.density)
    values = 4 * sum(chosen.room(end - begin) for begin, end in layers.large)
    messages = sum(chosen.payload_bytes(end - begin, torch.float32) for begin, end in layers.large)
    raw = 4 * int(layers.small.sum()) * ring
    if method.masks == "own":
        return raw + messages * once
    # Of one mask every worker sends the indices that are its shards'.
    indices = 0 if method.masks == "known" else (messages - values) / workers * once
    return raw + values * ring + indices


class Layers:
    """The parameters of a model in one flat tensor, ``weights``, and its gradients, where each layer is a span."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.numel = sum(parameter.numel() for parameter in parameters)
        self.weights, self.gradient = torch.empty(self.numel), torch.zeros(self.numel)
        self.large: list[tuple[int, int]] = []
        self.small = torch.ones(self.numel, dtype=torch.bool)
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            self.weights[begin:end] = parameter.detach().view(-1)
            parameter.data = self.weights[begin:end].view(parameter.shape)
            parameter.grad = self.gradient[begin:end].view(parameter.shape)
            if parameter.numel() >= _LEAST:
                self.large.append((begin, end))
                self.small[begin:end] = False

    def largest(self, scores: Tensor, density: float) -> Tensor:
        """A mask of the largest scores of each layer that is not small, and of all elements of small ones."""
        mask = self.small.clone()
        for begin, end in self.large:
            mask[begin + scores[begin:end].topk(TopK(density).room(end - begin), sorted=False).indices] = True
        return mask


class _Step:
    """What weights lose in a step of ``lr``, from all workers' gradients (workers, elements)."""

    def __init__(self, method: Method, layers: Layers, workers: int, seed: int) -> None:
        self.method, self.layers = method, layers
        self.random = torch.Generator().manual_seed(seed)
        self.owner = (torch.arange(layers.numel) // _SHARD % workers).unsqueeze(0)
        self.received = torch.zeros(layers.numel)
        """A moving average of what all workers have received."""

    @torch.no_grad()
    def __call__(self, gradients: Tensor, lr: float) -> Tensor:
        return self.update(gradients, lr)

    def update(self, gradients: Tensor, lr: float) -> Tensor:
        raise NotImplementedError

    def mask(self, waiting: Tensor) -> Tensor:
        """Of what waits to be sent (workers, elements): one for each worker, or for all."""
        density, chosen = self.method.density, self.layers.largest
        match self.method.masks:
            case "own":
                return torch.stack([chosen(each.abs(), density) for each in waiting])
            case "mean":
                return chosen(waiting.mean(0).abs(), density)
            case "owners":
                return chosen(waiting.gather(0, self.owner)[0].abs(), density)
            case _:
                drawn = chosen(torch.rand(self.layers.numel, generator=self.random), 0.1 * density)
                return drawn | chosen(self.received.abs().masked_fill(drawn, -1.0), 0.9 * density)


class _Adam:
    """AdamW's moments, and its update without the weight decay."""

    def __init__(self, *shape: int) -> None:
        self.momentum, self.square, self.steps = torch.zeros(shape), torch.zeros(shape), 0

    def __call__(self, gradient: Tensor, lr: float) -> Tensor:
        self.steps += 1
        self.momentum.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        divisor = (self.square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(_EPS)
        return self.momentum.div(divisor).mul_(lr / (1 - BETAS[0] ** self.steps))


def _adams(before: Tensor, after: Tensor, lr: float) -> Tensor:
    """AdamS (2505.16363): the momentum over the root of itself, one step before, and of the gradient, squared."""
    gradient = (after - BETAS[0] * before) / (1 - BETAS[0])
    return lr * after / (BETAS[1] * before.square() + (1 - BETAS[1]) * gradient.square()).sqrt_().add_(_EPS)


class _Dense(_Step):
    """All of the mean gradient, under AdamW or AdamS."""

    def __init__(self, method: Method, layers: Layers, workers: int, seed: int) -> None:
        super().__init__(method, layers, workers, seed)
        self.adam, self.momentum = _Adam(layers.numel), torch.zeros(layers.numel)

    def update(self, gradients: Tensor, lr: float) -> Tensor:
        mean = gradients.mean(0)
        if self.method.optimizer == "AdamW":
            return self.adam(mean, lr)
        before, self.momentum = self.momentum, self.momentum.lerp(mean, 1 - BETAS[0])
        return _adams(before, self.momentum, lr)


class _Updates(_Step):
    """Error feedback on AdamW's update, as `CompressedAdamW(order="update")` has it."""

    def __init__(self, method: Method, layers: Layers, workers: int, seed: int) -> None:
        super().__init__(method, layers, workers, seed)
        self.adam, self.waiting = _Adam(workers, layers.numel), torch.zeros(workers, layers.numel)

    def update(self, gradients: Tensor, lr: float) -> Tensor:
        late = self.mask(self.waiting) if self.method.late else None
        self.waiting += self.adam(gradients, lr)
        mask = self.mask(self.waiting) if late is None else late
        sent = torch.where(mask, self.waiting, 0.0)
        self.waiting -= sent
        mean = sent.mean(0)
        self.received.lerp_(mean, 1 - BETAS[0])
        return mean


class _Momenta(_Step):
    """First moments, whose means take the place of workers' own where they are sent; only there, weights change.

    The mean gradient that the divisor needs follows from the means before and after, so that one buffer is sent.
    """

    def __init__(self, method: Method, layers: Layers, workers: int, seed: int) -> None:
        super().__init__(method, layers, workers, seed)
        self.momenta = torch.zeros(workers, layers.numel)

    def update(self, gradients: Tensor, lr: float) -> Tensor:
        mask, before = self.mask(self.momenta), self.momenta.mean(0)
        self.momenta.lerp_(gradients, 1 - BETAS[0])
        after = self.momenta.mean(0)
        self.momenta = torch.where(mask, after, self.momenta)
        return torch.where(mask, _adams(before, after, lr), 0.0)
