"""What could be done with a pipeline, and how long a step would take then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire.compressors import Compressor, coder_of, parse
from thinwire.plan.forecast.ranges import Range
from thinwire.policies import ByLink, choose_by_link
from thinwire.runtime.probe import Pair
from thinwire_tools.doctor.observer_pipeline import WatchedPipeline
from thinwire_tools.doctor.settings import Care, Prediction, Setting
from thinwire_tools.planner import (
    PYTORCH_CLASSES,
    REFERENCE,
    SCHEDULES,
    Boundary,
    Choice,
    LinkCost,
    Schedule,
    ScheduleName,
    Simulated,
    StageTimes,
    simulate,
)

CHECKPOINT = 'checkpoint[f"stage{index}"] = stage.state_dict()  # on every rank, beside the model'


@dataclass(frozen=True)
class PipelineSetting(Setting):
    """A setting of what crosses stage boundaries, ``spec`` forward, and of the schedule."""

    backward: str | None = None
    by_link: bool = False
    """Whether compressors are chosen for each boundary by its link."""
    schedule: ScheduleName | None = None
    """None for the present one."""

    @property
    def is_today(self) -> bool:
        return self.spec is None and self.schedule is None

    @property
    def lines(self) -> tuple[str, ...]:
        lines: list[str] = []
        if self.by_link:
            lines = ["import thinwire", "stage = thinwire.compress(stage, adapt=thinwire.policies.ByLink())"]
        elif self.spec is not None:
            given = f'forward="{self.spec}", backward="{self.backward}"'
            lines = ["import thinwire", f"stage = thinwire.compress(stage, {given})  # before the schedule is made"]
        if self.by_link or (self.spec is not None and self.spec.startswith("delta")):
            lines += ["stage.set_sample_ids(ids)  # on the first stage, before each step (thinwire.data.Indexed)"]
            lines += [CHECKPOINT]
        if self.schedule is not None:
            many = "" if self.schedule in ("1f1b", "gpipe") else "s"
            lines += [f"schedule = {PYTORCH_CLASSES[self.schedule]}(stage{many}, n_microbatches, loss_fn=loss_fn)"]
        return tuple(lines)


_COMPRESSED = (
    PipelineSetting("sent ahead, uncompressed", "raw", backward="raw"),
    PipelineSetting("3 and 6 bits", REFERENCE[0], backward=REFERENCE[1], care=Care.KEPT),
    PipelineSetting("bits by link", "delta(maxabs(bits=4))", backward="maxabs(bits=8)", by_link=True, care=Care.CHECK),
    PipelineSetting("4 bits, no ids", "gaussian(bits=4)", backward="maxabs(bits=8)", care=Care.CHECK),
)


@dataclass(frozen=True)
class MeasuredPipeline:
    """All that predictions are made from."""

    watched: WatchedPipeline
    pairs: tuple[Pair, ...]
    codecs: dict[Compressor, tuple[float, float]]
    """Seconds in which the slowest rank encodes an element, and decodes one."""

    @property
    def rest_s(self) -> float:
        """Seconds of a step that the pipeline does not take: data loading, the optimizer."""
        pairs = zip(self.watched.step_s, self.watched.pipeline_s, strict=True)
        return median(step - pipeline for step, pipeline in pairs)

    def pair(self, boundary: int) -> Pair:
        """The link of a boundary."""
        num_ranks = len(self.watched.schedule.ranks)
        wanted = sorted((boundary % num_ranks, (boundary + 1) % num_ranks))
        return next(pair for pair in self.pairs if [pair.first, pair.second] == wanted)

    def specs(self, setting: PipelineSetting) -> list[tuple[str, str]]:
        """By boundary, the compressors forward and backward."""
        sizes = self.watched.activation_bytes
        if not setting.by_link:
            return [(setting.spec or "raw", setting.backward or "raw")] * len(sizes)
        rates = [self.pair(b).bandwidth for b in range(len(sizes))]
        stages = self.watched.stages[len(self.watched.stages) // 2]
        chosen: list[list[str]] = []
        for listed, seconds in (
            (ByLink().forward, max(stage.forward_s for stage in stages)),
            (ByLink().backward, max(stage.backward_s for stage in stages)),
        ):
            choices = [Choice.from_compressor(parse(spec)) for spec in listed]
            picked = choose_by_link([[choice.share * size for choice in choices] for size in sizes], rates, seconds)
            chosen.append([choices[i].spec for i in picked])
        return list(zip(*chosen, strict=True))


def pipeline_settings(schedule: Schedule, specs: Sequence[str] = ()) -> list[PipelineSetting]:
    """The usual ones, these compressors of activations besides, and other schedules of as many stages."""
    usual = [PipelineSetting("as it is"), *_COMPRESSED]
    known = {parse(setting.spec) for setting in usual if setting.spec}
    more = [str(parse(spec)) for spec in specs if parse(spec) not in known]
    usual += [PipelineSetting(spec, spec, backward=REFERENCE[1], care=Care.CHECK) for spec in more]
    others: list[PipelineSetting] = []
    for name in SCHEDULES:
        if name != schedule.name and _rebuilt(schedule, name) is not None:
            others += [PipelineSetting(name, schedule=name)]
            others += [replace(_COMPRESSED[1], title=f"{name}, 3 and 6 bits", schedule=name)]
    return [*usual, *others]


def pipeline_compressors(settings: Sequence[PipelineSetting]) -> set[Compressor]:
    """Compressors whose speed predictions need."""
    listed = [parse(spec) for setting in settings for spec in (setting.spec, setting.backward) if spec is not None]
    usual = ByLink()
    listed += [parse(spec) for spec in (*usual.forward, *usual.backward)]
    return {coder_of(compressor) for compressor in listed}


def predict_pipeline(setting: PipelineSetting, measured: MeasuredPipeline) -> Prediction:
    """Over the measured steps."""
    runs = [simulated(setting, measured, stages) for stages in measured.watched.stages]
    rest = measured.rest_s
    steps = [run.step_s + rest for run in runs]
    waits = [run.exposed_s / step for run, step in zip(runs, steps, strict=True)]
    sent = sent_bytes(setting, measured)
    return Prediction(setting, tuple(steps), max(sent), Range.from_values(waits).value)


def simulated(setting: PipelineSetting, measured: MeasuredPipeline, stages: Sequence[StageTimes]) -> Simulated:
    """A step of the pipeline alone, with what stages computed in one measured step."""
    schedule = measured.watched.schedule
    if setting.schedule is not None:
        schedule = _rebuilt(schedule, setting.schedule)
        assert schedule is not None, "pipeline_settings() has asked"
    if schedule.splits_backward and not measured.watched.schedule.splits_backward:
        # What the weights take is not known: in linear layers, as much as the input.
        stages = [replace(stage, weights_s=stage.backward_s / 2) for stage in stages]
    boundaries = []
    for b, (forward, backward) in enumerate(measured.specs(setting)):
        boundaries.append(
            Boundary(*(_link_cost(measured, b, spec, native=setting.spec is None) for spec in (forward, backward)))
        )
    return simulate(schedule, stages, boundaries, ahead=setting.spec is not None)


def sent_bytes(setting: PipelineSetting, measured: MeasuredPipeline) -> list[float]:
    """By rank, in a step."""
    num_ranks, chunks = len(measured.watched.schedule.ranks), measured.watched.schedule.num_chunks
    sent = [0.0] * num_ranks
    for b, (specs, size) in enumerate(zip(measured.specs(setting), measured.watched.activation_bytes, strict=True)):
        forward, backward = (chunks * size * Choice.from_compressor(parse(spec)).share for spec in specs)
        sent[b % num_ranks] += forward
        sent[(b + 1) % num_ranks] += backward
    return sent


def _link_cost(measured: MeasuredPipeline, boundary: int, spec: str, *, native: bool) -> LinkCost:
    pair, size = measured.pair(boundary), measured.watched.activation_bytes[boundary]
    if native:
        return LinkCost(size / pair.bandwidth, pair.latency_s)
    encode, decode = measured.codecs[coder_of(parse(spec))]
    share = Choice.from_compressor(parse(spec)).share
    return LinkCost(share * size / pair.bandwidth, pair.latency_s, encode * size / 4, decode * size / 4)


def _rebuilt(schedule: Schedule, name: ScheduleName) -> Schedule | None:
    """Another schedule of the same stages; None if it does not take them."""
    try:
        return Schedule.build(name, len(schedule.ranks), schedule.num_chunks, schedule.per_rank)
    except ValueError:
        return None
