"""What trainings say: perplexity lost to the baseline, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from thinwire.repro.findings import no_worse, share
from thinwire.repro.qsdp.trainings import Trained
from thinwire.repro.statistics import Estimate, relative_differences


@dataclass(frozen=True)
class Lost:
    """How much higher a way's perplexity is, as a share of another's."""

    estimate: Estimate
    within: bool | None
    """Whether at most the margin, at 95 %; None where too few seeds were trained to say."""
    text: str

    @property
    def beyond(self) -> bool | None:
        """The opposite."""
        return None if self.within is None else not self.within


def lost(runs: Sequence[Trained], others: Sequence[Trained], margin: float) -> Lost:
    """By perplexity on all held-out text, of weights as they are gathered."""
    ours, theirs = perplexities(runs), perplexities(others)
    found, within = no_worse(relative_differences(ours, theirs), margin)
    return Lost(found, within, f"perplexity {fmean(ours):.3f} against {fmean(theirs):.3f}: {share(found)}")


def perplexities(runs: Sequence[Trained]) -> list[float]:
    return [run.perplexity for run in runs]


def mean_perplexity(runs: Sequence[Trained]) -> float:
    return fmean(perplexities(runs))


def curve(runs: Sequence[Trained]) -> tuple[list[int], list[float]]:
    """Steps, and the mean over seeds of the probe's perplexity there; what diverged is left out."""
    steps = [0, *runs[0].probe_steps]
    means = [fmean(values) for values in zip(*(run.probes for run in runs), strict=True)]
    shown = [(step, mean) for step, mean in zip(steps, means, strict=True) if math.isfinite(mean)]
    return [step for step, _ in shown], [mean for _, mean in shown]


def facts(runs: Sequence[Trained]) -> dict[str, list[float]]:
    """What a row's JSON keeps of trainings, by seed."""
    return {
        "perplexities": perplexities(runs),
        "of_weights_as_kept": [run.master_perplexity for run in runs],
    }
