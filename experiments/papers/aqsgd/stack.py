"""What is measured and drawn of the full stack: gradients compressed as well, split learning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Self

from experiments.framework.claims import Row
from experiments.framework.rank import Call, Rank
from experiments.framework.ranks import Ranks
from experiments.framework.study import draw_bars
from experiments.framework.timing import Times
from experiments.framework.training import Trainings
from experiments.framework.verdicts import courses, sooner
from experiments.papers.aqsgd import tasks
from experiments.papers.aqsgd.methods import (
    ACTIVATIONS,
    ADAM,
    AQSGD,
    BF16,
    CONTROL,
    DIRECT,
    FP32,
    ONLY_GRADIENTS,
    POWERSGD,
    QUANTIZED,
    SPLIT,
    WARMING,
    Method,
)
from experiments.papers.aqsgd.split import Splitting, run_split
from experiments.papers.aqsgd.study import course, draw_runs, facts, held_out
from experiments.papers.aqsgd.tasks import Stacked
from experiments.papers.aqsgd.timing import LinkedScale, OverLinks, PipelineTiming, draw_rates, where
from experiments.papers.aqsgd.trainings import Trained
from experiments.tasks.images import Model, load
from thinwire_tools import plots
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.statistics import reached, relative_differences

NUM_STAGES = 2
NUM_RANKS = NUM_STAGES * Stacked.replicas
CURVES = (FP32, AQSGD, DIRECT, CONTROL)
TIMED = (FP32, ACTIVATIONS, ONLY_GRADIENTS, AQSGD)
OPTIMIZERS = (ADAM, BF16, POWERSGD, QUANTIZED)
ADAM_RATE = "100mbit"
_ADAM_STEPS = 3
"""Of a turn."""
_LAST_ROUNDS = 3
"""Of split learning, whose losses are noisy: the mean of these is the training loss."""


@dataclass(frozen=True, kw_only=True)
class StackScale(LinkedScale):
    """``data``: CIFAR-10 for split learning instead of the digits."""

    small: Stacked = tasks.STACKED_SMALL
    timed: Stacked = tasks.STACKED_TIMED
    to_loss: Stacked = tasks.STACKED_TO_LOSS
    replicated: Stacked = tasks.REPLICATED
    split: Splitting = field(default_factory=Splitting)
    data: str | None = None

    def adapted(self, **options: Any) -> Self:
        made = super().adapted(**options)
        return replace(made, split=replace(made.split, cifar=made.data))

    def about(self) -> dict[str, Any]:
        load(self.data)
        standard_library()
        return {"num_stages": NUM_STAGES, "control": CONTROL.title}


class StackTrainings(Trainings):
    """Trainings in replicas of a pipeline, each by new processes: groups of a part of the world stay until their
    processes end, and each wakes up a hundred times a second."""

    def __enter__(self) -> Self:
        self.network = self._stack.enter_context(self._made)
        return self

    def call(self, function: Call, **arguments: Any) -> list[dict[str, Any]]:
        with Ranks(self.num_ranks, nullcontext(self.network)) as ranks:
            return ranks.call(function, **arguments)


@dataclass
class StackStudy(OverLinks[StackScale]):
    def timing(self) -> PipelineTiming:
        """Ranks that are timed; others use their network, too."""
        grid: dict[str, Any] = {"num_ranks": NUM_RANKS, "num_stages": NUM_STAGES}
        return self.kept("timing", lambda: PipelineTiming(emulated=self.emulated, **grid))

    def trainings(self, num_ranks: int) -> Trainings:
        """Training over the links of those that are timed, without a limit."""
        timing = self.timing()
        timing.shape(None)
        return self.kept("trainings", lambda: StackTrainings(num_ranks, nullcontext(timing.network), self.cache))

    def train(self, method: Method, task: Stacked) -> list[Trained]:
        """A training of ``task`` from every seed, unless it has been."""
        return self.run(NUM_RANKS, task, method, method.title)

    def split(self, methods: Mapping[str, Method]) -> dict[str, list[dict[str, Any]]]:
        """What split learning by each method found, by seed: every rank takes its share of these trainings.

        Raises:
            RankFailedError: a rank did not make it.
        """
        pairs, task = [(name, seed) for seed in self.seeds for name in methods], dataclasses.asdict(self.scale.split)
        jobs = [
            {"seed": seed, "task": task, "forward": methods[name].forward, "backward": methods[name].backward}
            for name, seed in pairs
        ]

        def show(event: dict[str, Any]) -> None:
            self.advance(1, f"{methods[pairs[event['job']][0]].title}: loss {event['loss']:.2f}")

        answers = self.timing().call(Rank.share, run=run_split, jobs=jobs, hear=show, teller=None)
        results = {int(at): result for answer in answers for at, result in answer["results"].items()}
        by_method: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
        for at, (name, _) in enumerate(pairs):
            by_method[name].append(results[at])
        return by_method


# --- figure 5: loss by step, throughput with either part switched off, time to the same loss


def figure_5(study: StackStudy) -> list[Row]:
    """Curves over loopback, then throughput over all links, then time over the slowest."""
    curves = _curves(study)
    throughput = study.measured.get(("figure 5", "throughput")) or _throughput(study)
    return [*curves, throughput, _time(study, throughput)]


def _curves(study: StackStudy) -> list[Row]:
    trained = {method.name: study.train(method, study.scale.small) for method in CURVES}
    base = trained[FP32.name]
    titles = ["2 stages in 2 replicas: training", "held out, at the end"]
    figure, (axes, ends) = plots.canvas(2, titles=titles, x="step", y="loss")
    for method in CURVES:
        draw_runs(axes, method, trained[method.name])
    shown = [
        (method.title, method.color, median(run.held_out[-1] for run in trained[method.name])) for method in CURVES
    ]
    draw_bars(ends, shown)
    ends.set_xlim(left=0.95 * min(value for _, _, value in shown))
    plots.save(figure, study.picture("5-curves"))
    rows = []
    for method in CURVES[1:]:
        runs = trained[method.name]
        differences = relative_differences([run.loss for run in runs], [run.loss for run in base])
        data = {"title": method.title, **facts(runs), "baseline": facts(base), "differences": differences}
        rows.append(Row("figure 5", f"loss/{method.name}", fmean(differences), "", data))
    return rows


def _throughput(study: StackStudy) -> Row:
    """All methods in turns, over links of each rate."""
    scale, task = study.scale, study.scale.timed
    links = {rate: study.scaled(rate) for rate in scale.rates}
    times = study.timing().times(
        study.model, TIMED, rounds=scale.rounds, steps=1, rates=list(links.values()), on_turn=study.advance
    )
    by_rate = dict(zip(scale.rates, times, strict=True))
    items = task.batch * task.replicas
    per_s = {method.name: {rate: items / by_rate[rate].step_s(method.name) for rate in links} for method in TIMED}
    title = f"2 stages in 2 replicas, {task.num_micro} micro-batches"
    draw_rates(study, "5-throughput", title, TIMED, per_s)
    data = {
        "per_s": per_s,
        "titles": {method.name: method.title for method in TIMED},
        "links": links,
        "by_round": {rate: timed.rounds for rate, timed in by_rate.items()},
        "step_bytes": by_rate[scale.rates[0]].payload_bytes,
        "slowdown": study.slowdown,
        "computed_s": study.computed().seconds,
        "replicas": task.replicas,
    }
    return Row("figure 5", "throughput", per_s[AQSGD.name][scale.rates[0]], "sequences/s", data)


def _time(study: StackStudy, throughput: Row) -> Row:
    """Steps to a loss are those of trainings without a limit, times those of steps over the slowest link. The first
    epoch is as long as FP32's, because first visits are sent whole, and so are gradients of the warm-up."""
    slow, task = study.scale.rates[0], study.scale.to_loss
    first = task.steps_per_epoch
    paces = {
        FP32: ((task.steps, FP32.name),),
        AQSGD: ((first, FP32.name), (task.exact_steps - first, ACTIVATIONS.name), (task.steps, AQSGD.name)),
    }
    base, ours = (course(study.train(method, task), *pace) for method, pace in paces.items())
    rounds, title = throughput.data["by_round"][slow], f"over {where(slow, throughput.data['links'][slow])}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="seconds of training", y="loss")
    for method, found in zip(paces, (base, ours), strict=True):
        found.draw(axes, rounds, color=method.color, label=method.title)
    plots.save(figure, study.picture("5-time"))
    data = {"courses": courses(fp32=base, aqsgd=ours), "exact_steps": task.exact_steps}
    return Row("figure 5", "sooner", sooner(ours, base, rounds).times, "x", data)


# --- QuantizedAdam against Adam, bf16 gradients and PowerSGD, in plain data parallelism over 100 Mbit/s


def adam(study: StackStudy) -> list[Row]:
    """Steps to a loss are those of trainings without a limit, their times those of turns over the slow link."""
    task, rate = study.scale.replicated, ADAM_RATE if study.emulated else None
    trained = {method.name: study.train(method, task) for method in OPTIMIZERS}
    # What turns train is past its warm-up.
    model = Model("gpt", "GPT", "", replace(task, exact_steps=1), task.batch, "sequences/s", 0)
    timed = (*OPTIMIZERS, WARMING)
    (times,) = study.timing().times(
        model, timed, rounds=study.scale.rounds, steps=_ADAM_STEPS, rates=(rate,), on_turn=study.advance
    )
    runs = {m.name: [at_steps(run, m, times, task.exact_steps) for run in trained[m.name]] for m in OPTIMIZERS}
    targets = [max(own[seed].loss for own in runs.values()) for seed in study.seeds]
    _draw_adam(study, runs)
    ours, base = runs[QUANTIZED.name], runs[ADAM.name]
    differences = relative_differences([run.loss for run in ours], [run.loss for run in base])
    rows = [Row("adam", "loss", fmean(differences), "", {"differences": differences})]
    for method in OPTIMIZERS[:-1]:
        longer = relative_times(ours, runs[method.name], targets)
        gained = 1 / (1 + fmean(longer)) if all(map(math.isfinite, longer)) else math.nan
        rows.append(Row("adam", f"sooner/{method.name}", gained, "x", {"differences": longer}))
    facts = {method.name: _optimizer_facts(method, runs[method.name], times, targets) for method in OPTIMIZERS}
    reached = facts[QUANTIZED.name]["seconds"]
    data = {"methods": facts, "link": rate, "warming_s": times.step_s(WARMING.name), "rounds": times.rounds}
    data |= {"exact_steps": task.exact_steps}
    return [*rows, Row("adam", "seconds", math.nan if reached is None else reached, "s", data)]


def at_steps(run: Trained, method: Method, times: Times, exact_steps: int) -> Trained:
    """The training as long as its steps take over the slow link; QuantizedAdam's first ones are exact."""
    exact = exact_steps if method is QUANTIZED else 0
    step_s = [times.step_s(WARMING.name)] * exact + [times.step_s(method.name)] * (len(run.losses) - exact)
    return replace(run, step_s=tuple(step_s))


def relative_times(ours: Sequence[Trained], others: Sequence[Trained], targets: Sequence[float]) -> list[float]:
    """By how much longer ours take than the others to be at each seed's target, as a share; infinite if never."""
    differences = []
    for mine, other, target in zip(ours, others, targets, strict=True):
        seconds = [_seconds_to(run, target) if math.isfinite(target) else None for run in (mine, other)]
        differences.append(seconds[0] / seconds[1] - 1 if seconds[0] and seconds[1] else math.inf)
    return differences


def _optimizer_facts(method: Method, runs: Sequence[Trained], times: Times, targets: Sequence[float]) -> dict[str, Any]:
    """Loss at the end, and mean seconds and steps until the targets; None where one is never reached."""
    seconds = [_seconds_to(run, target) for run, target in zip(runs, targets, strict=True)]
    known = [value for value in seconds if value is not None]
    reached = fmean(known) if len(known) == len(seconds) else None
    return {
        "title": method.title,
        "step_s": times.step_s(method.name),
        "loss": fmean(held_out(run) for run in runs),
        "losses": [run.epoch_losses for run in runs],
        "seconds": reached,
        "steps": None if reached is None else fmean(map(steps_within, runs, known)),
        "payload_bytes": times.payload_bytes.get(method.name),
    }


def _seconds_to(run: Trained, loss: float) -> float | None:
    return reached(run.seconds, run.epoch_losses, loss)


def steps_within(run: Trained, seconds: float) -> float:
    """Steps that fit into so many seconds of a training."""
    done, left = 0.0, seconds
    for step_s in run.step_s:
        if left <= step_s:
            return done + left / step_s
        done, left = done + 1, left - step_s
    return done


def _draw_adam(study: StackStudy, runs: Mapping[str, Sequence[Trained]]) -> None:
    titles = [f"{study.scale.replicated.replicas} replicas over 100 Mbit/s"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="seconds", y="loss")
    for method in OPTIMIZERS:
        own = runs[method.name]
        losses = [fmean(column) for column in zip(*(run.epoch_losses for run in own), strict=True)]
        if all(map(math.isfinite, losses)):
            axes.plot(own[0].seconds, losses, color=method.color, marker=".", label=method.title)
    plots.save(figure, study.picture("adam"))


# --- figure 10: trainings in one process


def figure_10(study: StackStudy) -> list[Row]:
    """Split learning: a seed is that of the weights, of who has which images, and of how they are seen."""
    task = study.scale.split
    runs_by_method = study.split(SPLIT)
    _draw_split(study, runs_by_method)
    images, rows = task.images.name, []
    losses = {name: [fmean(run["losses"][-_LAST_ROUNDS:]) for run in runs] for name, runs in runs_by_method.items()}
    accuracies = {name: [float(run["accuracies"][-1][1]) for run in runs] for name, runs in runs_by_method.items()}
    for name, runs in runs_by_method.items():
        shown = f"{fmean(accuracies[name]):.1%}"
        rows.append([SPLIT[name].title, f"{fmean(losses[name]):.3f}", shown, _fewer(runs)])
    head = ["", "training loss", "test accuracy", "fewer bytes, first visits included"]
    data = {"images": images, "clients": task.clients, "rounds": task.rounds, "loss": losses, "accuracy": accuracies}
    data |= {
        "table": {"title": f"Split learning, {images}", "head": head, "rows": rows},
        "alike": [run["alike"] for run in runs_by_method["aqsgd"]],
        "losses": {name: [run["losses"] for run in runs] for name, runs in runs_by_method.items()},
        "accuracies": {name: [run["accuracies"] for run in runs] for name, runs in runs_by_method.items()},
    }
    return [Row("figure 10", "table", accuracies["aqsgd"][0], "", data)]


def _draw_split(study: StackStudy, runs_by_method: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    titles = ["split learning: training loss", "test accuracy"]
    figure, (left, right) = plots.canvas(2, titles=titles, x="round", y=["loss", ""])
    for name, runs in runs_by_method.items():
        method = SPLIT[name]
        losses = [fmean(column) for column in zip(*(run["losses"] for run in runs), strict=True)]
        left.plot(range(1, len(losses) + 1), losses, color=method.color, label=method.title)
        rounds = [at for at, _ in runs[0]["accuracies"]]
        shares = zip(*([value for _, value in run["accuracies"]] for run in runs), strict=True)
        right.plot(rounds, [fmean(column) for column in shares], color=method.color, label=method.title)
    plots.save(figure, study.picture("10-split"))


def _fewer(runs: Sequence[Mapping[str, Any]]) -> str:
    sent = fmean(run["sent_bytes"] for run in runs)
    return f"{fmean(run['dense_bytes'] for run in runs) / sent:.1f}x" if sent else "1.0x"
