"""Paired runs: every variant trained from the same seeds as the baseline, by processes that live through all of it.

`compare_training` is what other comparisons call with a task of their own; ``thinwire compare`` is its command.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.plan import Plan, sent_bytes
from thinwire.runtime import ParityError
from thinwire_tools import lab
from thinwire_tools.compare import statistics
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.statistics import CONTROL
from thinwire_tools.compare.tasks import Task, describe, probe_steps
from thinwire_tools.compare.train import digest, learning_rate, train
from thinwire_tools.compare.variants import BASELINE, Variant
from thinwire_tools.lab.units import parse_rates
from thinwire_tools.ranks import Channel, RankFailedError, RankProcesses, launch_ranks

_TIMEOUT_S = 180.0


class Watcher:
    """An observer of runs, which by itself does nothing."""

    def plan(self, num_runs: int) -> None:
        """Note that ``num_runs`` more runs follow."""

    def begin(self, title: str) -> None:
        """Note that a run begins, or continues."""

    def step(self, step: int, loss: float) -> None:
        """Note that the run has made step ``step``, with its ``loss``."""

    def turn(self, run: Run) -> None:
        """Note that the run was evaluated."""

    def end(self, run: Run) -> None:
        """Note that the run is over."""

    def fail(self, failure: RankFailedError) -> None:
        """Note that the run will not continue; others may."""


def compare_training(
    task: Task,
    variants: Sequence[str],
    *,
    seeds: Sequence[int],
    margin: float = 0.01,
    control: str | None = CONTROL,
    num_ranks: int = 2,
    rate: str | None = None,
    measure: int = 0,
    watcher: Watcher | None = None,
) -> Comparison:
    """Train ``task`` with each variant and without compression, from each seed, and compare the held-out losses.

    Args:
        task: what is trained (`thinwire_tools.compare.tasks.Task`).
        variants: specs of compressors, as ``"minmax(bits=4, bucket=128)"``; or specs with a policy that adapts them
            layer by layer, as ``"topk(density=0.01) with lgreco(every=25)"``; or ``"alone"``: ranks send nothing.
        seeds: seeds of weights, batches and rounding; one paired run each.
        margin: how much higher a loss may be, as a share, and still be the same.
        control: a spec that must turn out worse than that; None for none.
        num_ranks: ranks, at least 2, each a process.
        rate: rate of each rank's link, emulated; None for loopback. The control runs on an unshaped link.
        measure: every so many steps, take the exact mean as well and note the received mean's error
            (``Run.alpha``); its bytes are not counted, but where a link is emulated its time is. 0 never does.
        watcher: notified of the progress of the runs.

    Raises:
        ValueError: a spec, a policy, a rate or a number is wrong, or the baseline diverged.
        TypeError: the task cannot be made again in another process.
        ImportError: scipy is missing.
        LabUnavailableError: a rate is given and no network can be emulated here.
        RankFailedError: a rank did not finish a run.
        ParityError: ranks ended with different parameters, so that there is no one loss.
    """
    _check(named(variants, control)[0], seeds, margin, num_ranks, rate, measure)
    with Runs(task, num_ranks, rate, watcher or Watcher(), measure) as runs:
        return compare_runs(runs, variants, seeds=seeds, margin=margin, control=control)


def compare_runs(
    runs: Runs, variants: Sequence[str], *, seeds: Sequence[int], margin: float = 0.01, control: str | None = CONTROL
) -> Comparison:
    """Run `compare_training` by processes that live on: runs are not repeated."""
    specs, control = named(variants, control)
    _check(specs, seeds, margin)
    order = [None, *specs, *([control] if control else [])]
    trained: dict[str | None, list[Run]] = {spec: [] for spec in order}
    runs.expect(order, seeds)
    for seed in seeds:
        # Seed by seed: anything that slows the machine for a while slows all variants.
        for spec in order:
            trained[spec].append(runs.run(spec, seed, shaped=spec is None or spec != control))
    sides = {
        spec: Side(
            spec or BASELINE, runs.task.learning_rate, tuple(trained[spec]), on_link=spec is None or spec != control
        )
        for spec in order
    }
    return Comparison(
        seeds=tuple(seeds),
        margin=margin,
        shaped=runs.shaped,
        baseline=sides[None],
        variants=tuple(sides[spec] for spec in specs),
        control=sides[control] if control else None,
        about=runs.about,
    )


def named(variants: Sequence[str], control: str | None) -> tuple[list[str], str | None]:
    """Return variants and control as canonical text, each once."""
    specs = list(dict.fromkeys(str(Variant.parse(variant)) for variant in variants))
    control = None if control is None else str(Variant.parse(control))
    if control in specs:
        raise ValueError(f"{control} is both a variant and the control, which must fail: give another control")
    return specs, control


def check_margin(margin: float) -> None:
    """Raise an error unless a margin is a share of the loss."""
    if not 0 < margin < 1:
        raise ValueError(f"a margin of {margin}: give a share between 0 and 1, as 0.01 for 1 %")


def _check(
    specs: Sequence[str],
    seeds: Sequence[int],
    margin: float,
    num_ranks: int = 2,
    rate: str | None = None,
    measure: int = 0,
) -> None:
    statistics.need_scipy()
    if not specs:
        raise ValueError("nothing to compare: give at least one spec, as 'minmax(bits=4, bucket=128)'")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds {list(seeds)}: give at least one (--seeds 1), all different and none negative")
    check_margin(margin)
    if num_ranks < 2:
        raise ValueError(f"{num_ranks} ranks: a comparison needs at least 2, with one nothing is sent")
    if measure < 0:
        raise ValueError(f"measuring every {measure} steps: give a number of steps, or 0 for never")
    if rate is not None:
        parse_rates(rate, num_ranks)


# --- on a rank


class Rank:
    """One rank of a comparison: its process group, task, and run under way.

    A run is `begin` (build the model and evaluate it), `train` (until a step, and evaluate) and `finish` (evaluate on
    all held-out data). Before and after the steps of `train` it waits until the parent releases all ranks together, so
    that the parent can read the link's counters while nothing is sent.
    """

    def __init__(self, channel: Channel, task: Task) -> None:
        self.channel, self.task = channel, task
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def begin(self, variant: Variant, seed: int, measure: int) -> dict[str, Any]:
        """Start a run of ``variant`` from ``seed``."""
        task = self.task
        self.every, self.steps_done = variant.every, 0
        self.model = task.build(seed)
        ddp, optimizer = variant.prepare(task, self.model)
        self.attached = variant.attach(ddp, optimizer, seed, measure)
        self.asked = self.attached.wire.plan if self.attached.wire else None
        # Random draws of training (dropout) are the same for every variant, too.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        rate = task.learning_rate * variant.rate_factor
        self.steps = train(
            task,
            ddp,
            optimizer,
            task.batches(seed, self.rank, self.num_ranks),
            lambda step: learning_rate(rate, step, task.steps),
        )
        return {"probe": self._evaluate(probe=True)}

    def train(self, until: int) -> dict[str, Any]:
        """Train until step ``until``: return the seconds of each step, the bytes sent so far, this rank's sum of the
        loss and its number of terms."""
        step_s = []
        self.channel.hold("train")
        for step in range(self.steps_done + 1, until + 1):
            loss, seconds = next(self.steps)
            step_s.append(seconds)
            self.channel.send("step", step=step, loss=loss)
        if until == self.task.steps:
            started = time.perf_counter()
            self.attached.finish()
            step_s[-1] += time.perf_counter() - started
        self.channel.hold("trained")
        self.steps_done = until
        # An exchange is paid for by all steps of its round.
        rounds = [step_s[first : first + self.every] for first in range(0, len(step_s), self.every)]
        return {
            "step_s": [fmean(steps) for steps in rounds for _ in steps],
            "payload_bytes": self.attached.sent(until),
            "probe": self._evaluate(probe=True),
        }

    def finish(self) -> dict[str, Any]:
        """End the run: evaluate on all held-out data, hash the parameters, and return a policy's decisions.

        Ranks that train alone each evaluate their share with weights of their own. ``right`` is the number of right
        answers of a task that counts them.
        """
        wire = self.attached.wire
        held_out, right = self._held_out()
        result = {
            "alpha": wire.stats.alpha if wire else [],
            "plans": decided(wire, self.asked, self.model, self.num_ranks) if wire and self.asked else [],
            "adapt_s": wire.stats.adapt_s if wire else 0.0,
            "formula_bytes": self.attached.formula(),
            "held_out": held_out,
            "right": right,
            "digest": digest(self.model.parameters()),
        }
        self.attached.close()
        del self.model, self.steps, self.attached, wire
        gc.collect()
        return result

    @torch.no_grad()
    def _evaluate(self, *, probe: bool) -> tuple[float, int]:
        self.model.eval()
        loss = self.task.evaluate(self.model, self.rank, self.num_ranks, probe=probe)
        self.model.train()
        return loss

    @torch.no_grad()
    def _held_out(self) -> tuple[tuple[float, int], int | None]:
        """Return the loss over the whole held-out set as `_evaluate`, and the right answers, where they are counted."""
        score = getattr(self.task, "score", None)
        if score is None:
            return self._evaluate(probe=False), None
        self.model.eval()
        total, right, count = score(self.model, self.rank, self.num_ranks, probe=False)
        self.model.train()
        return (total, count), right


def plan_bytes(plan: Plan, shapes: Mapping[str, Sequence[int]], num_ranks: int) -> float:
    """Return the bytes that a rank sends for all layers of a plan in one step, without the messages' headers."""
    return sum(sent_bytes(compressor, shapes[name], num_ranks) for name, compressor in plan.layers.items())


def decided(wire: thinwire.Wire, asked: Plan, model: nn.Module, num_ranks: int) -> list[dict[str, Any]]:
    """Return the plans that a policy chose: from which step on, bytes a step (and those of ``asked``, which the rules
    name), errors of plan and reference, each the sum of the layers' L2 norms (None where the policy takes none, or on
    another rank), and seconds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    reference_bytes = plan_bytes(asked, shapes, num_ranks)
    return [
        {
            "step": decision.step,
            "wire_bytes": plan_bytes(decision.plan, shapes, num_ranks),
            "reference_wire_bytes": reference_bytes,
            "error": _norms(decision.errors),
            "reference_error": _norms(decision.reference_errors),
            "errors_s": decision.errors_s,
            "solve_s": decision.solve_s,
            "waited_s": decision.waited_s,
            "note": decision.note,
        }
        for decision in wire.decisions
    ]


def _norms(squared: Mapping[str, float]) -> float | None:
    """Return the sum of the layers' error norms, from their squared errors; None where there are none."""
    return math.fsum(math.sqrt(error) for error in squared.values()) if squared else None


# --- on the parent


class Training:
    """The run of ``variant``, called ``name``, by ``ranks``, turn by turn; ``network`` joins them (None: loopback)."""

    def __init__(
        self,
        ranks: RankProcesses,
        network: lab.Network | None,
        watcher: Watcher,
        name: str,
        variant: Variant,
        **asked: Any,
    ) -> None:
        self._ranks, self._network, self._watcher = ranks, network, watcher
        answers = ranks.run(Rank.begin, {"variant": variant, **asked})
        first, counted = _mean([answer["probe"] for answer in answers]), None if network is None else 0
        self.run = Run(name, losses=[first], payload_bytes=[0.0], wire_bytes=counted)

    def turn(self, until: int) -> None:
        """Train until step ``until``."""
        run, counters = self.run, []

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if rank == 0 and event["event"] == "step":
                self._watcher.step(event["step"], event["loss"])

        def on_hold(at: str) -> None:
            if self._network is not None:
                counters.append(self._network.interface_bytes(0)[0])

        answers = self._ranks.run(Rank.train, {"until": until}, on_event, on_hold)
        run.step_s += answers[0]["step_s"]
        run.probe_steps.append(until)
        run.payload_bytes.append(answers[0]["payload_bytes"])
        run.losses.append(_mean([answer["probe"] for answer in answers]))
        if run.wire_bytes is not None:
            run.wire_bytes += counters[1] - counters[0]
        self._watcher.turn(run)

    def finish(self) -> Run:
        """Evaluate on all held-out data."""
        answers, run = self._ranks.run(Rank.finish, {}), self.run
        first = answers[0]
        run.val_loss = _mean([answer["held_out"] for answer in answers])
        run.formula_bytes, run.plans, run.adapt_s = first["formula_bytes"], first["plans"], float(first["adapt_s"])
        run.accuracy = None if first["right"] is None else _accuracy(answers)
        run.replicas_identical = len({answer["digest"] for answer in answers}) == 1
        run.alpha = [(int(step), float(alpha)) for step, alpha in first["alpha"]]
        self._watcher.end(run)
        return run


def train_in_turns(
    task: Task,
    variants: Mapping[str, Variant],
    *,
    seed: int,
    num_ranks: int,
    network: lab.Network | None,
    watcher: Watcher,
) -> tuple[dict[str, Run], dict[str, RankFailedError]]:
    """Train every variant from one seed, a turn from probe to probe each, forwards and backwards: whatever else this
    machine does slows all alike, and a ratio of two within one turn compares them. Returns the runs that ended, and why
    the others did not: a variant that brings its processes down leaves the others alone."""
    runs, trainings, failures = {}, {}, {}
    watcher.plan(len(variants))
    with ExitStack() as stack:
        for turn, until in enumerate(probe_steps(task)):
            for name in list(variants)[:: 1 if turn % 2 == 0 else -1]:
                variant = variants[name]
                if name in failures:
                    continue
                watcher.begin(variant.title)
                try:
                    if name not in trainings:
                        link = network if variant.on_link else None
                        ranks, _ = stack.enter_context(_launch(task, num_ranks, link))
                        asked = {"seed": seed, "measure": 0}
                        trainings[name] = Training(ranks, link, watcher, name, variant, **asked)
                    trainings[name].turn(until)
                    if until == task.steps:
                        runs[name] = trainings[name].finish()
                except RankFailedError as failure:
                    failures[name] = failure
                    watcher.fail(failure)
    return {name: runs[name] for name in variants if name in runs}, failures


def _launch(task: Task, num_ranks: int, link: lab.Network | None) -> AbstractContextManager[tuple[RankProcesses, Path]]:
    return launch_ranks(partial(Rank, task=task), num_ranks, link, timeout_s=_TIMEOUT_S)


class Runs:
    """Rank processes and their link, and every run they have made; a context manager."""

    def __init__(self, task: Task, num_ranks: int, rate: str | None, watcher: Watcher, measure: int = 0) -> None:
        self.task, self.shaped = task, rate is not None
        self._num_ranks, self._rate, self._watcher, self._measure = num_ranks, rate, watcher, measure
        self._known: dict[tuple[str | None, int], Run] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._network = stack.enter_context(lab.Network(self._num_ranks)) if self._rate is not None else None
            self.about = {"task": describe(self.task), "num_ranks": self._num_ranks, "link": "loopback"}
            self._ranks, _ = stack.enter_context(_launch(self.task, self._num_ranks, self._network))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, specs: Sequence[str | None], seeds: Sequence[int]) -> None:
        """Tell the watcher how many runs follow."""
        self._watcher.plan(sum((spec, seed) not in self._known for spec in specs for seed in seeds))

    def run(self, spec: str | None, seed: int, *, shaped: bool) -> Run:
        """Train, unless it has been: a run is a function of its arguments, apart from its times."""
        if (spec, seed) not in self._known:
            self._set_link(shaped)
            self._known[spec, seed] = self._train(spec, seed)
        return self._known[spec, seed]

    def _train(self, spec: str | None, seed: int) -> Run:
        name = spec or BASELINE
        variant = Variant.parse(spec) if spec else Variant(BASELINE)
        self._watcher.begin(f"{name}, seed {seed}")
        asked = {"seed": seed, "measure": self._measure}
        training = Training(self._ranks, self._network, self._watcher, name, variant, **asked)
        for until in probe_steps(self.task):
            training.turn(until)
        run = training.finish()
        if variant.synchronized and math.isfinite(run.val_loss) and not run.replicas_identical:
            raise ParityError(f"{name}, seed {seed}: ranks hold different parameters after {self.task.steps} steps")
        return run

    def _set_link(self, shaped: bool) -> None:
        if self._network is not None:
            self._network.shape(self._rate if shaped else None)
            if shaped:
                self.about["link"] = self._network.describe()


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """Return the mean of a loss from every rank's sum and number of terms."""
    return math.fsum(total for total, _ in parts) / sum(count for _, count in parts)


def _accuracy(answers: Sequence[dict[str, Any]]) -> float:
    """Return the share of right answers among all ranks' held-out ones."""
    return sum(answer["right"] for answer in answers) / sum(answer["held_out"][1] for answer in answers)
