"""Figure 16: weak scaling, the batch of a rank held constant."""

from __future__ import annotations

from dataclasses import replace

from thinwire.repro import plots
from thinwire.repro.fft.methods import FFT, FP32, LOSSY, NOTHING
from thinwire.repro.fft.runs import Runs
from thinwire.repro.fft.study import Study
from thinwire.repro.findings import Finding

_METHODS = (FP32, *LOSSY)


def num_runs(world_sizes: tuple[int, ...]) -> int:
    """Trainings of a figure: one alone, and every method and the ceiling among several."""
    return sum(1 if size == 1 else 1 + len(_METHODS) for size in world_sizes)


def figure_16(study: Study) -> list[Finding]:
    """Images a second by world size, as multiples of one rank's. All ranks share this machine's cores."""
    scale = study.scale
    task = replace(scale.task, steps=scale.scaling_steps, probe_every=scale.scaling_steps, probe_images=1)
    names = [*(method.name for method in _METHODS), NOTHING]
    speeds: dict[str, dict[int, float]] = {name: {} for name in names}
    for size in scale.world_sizes:
        with Runs(task, size, study.runs.rate) as runs:
            if size == 1:
                alone = size / study.train_on(runs, None, 0).mean_step_s
                for name in names:
                    speeds[name][1] = alone
                continue
            for method in _METHODS:
                found = study.train_on(runs, method.spec, 0, exclude=method.exclude, shaped=True)
                speeds[method.name][size] = size / found.mean_step_s
            speeds[NOTHING][size] = size / study.train_on(runs, NOTHING, 0, shaped=True).mean_step_s
    times = {name: {size: value / found[min(found)] for size, value in found.items()} for name, found in speeds.items()}
    _draw_16(study, times)
    most = max(scale.world_sizes)
    best = max(LOSSY, key=lambda method: speeds[method.name][most])
    rows = []
    for name in names:
        share = speeds[name][most] / speeds[NOTHING][most]
        rows.append(
            Finding(
                "16",
                f"scaling/{name}",
                times[name][most],
                "x",
                "FFT has a higher iteration throughput than top-k, QSGD and TernGrad" if name == FFT.name else "",
                f"with {most} ranks {share:.0%} of the speed of sending nothing; the fastest is {best.title}",
                best is FFT if name == FFT.name and study.timed else None,
                {
                    "by_world_size": times[name],
                    "images_per_s": {size: task.batch * value for size, value in speeds[name].items()},
                    "share_of_ceiling": share,
                },
            )
        )
    return rows


def _draw_16(study: Study, times: dict[str, dict[int, float]]) -> None:
    over = f"over {study.runs.rate}" if study.timed else "over loopback"
    figure, (axes,) = plots.canvas(1, titles=[f"weak scaling {over}"], x="ranks", y="images a second, over one rank's")
    styles = {method.name: (method.title, method.colour) for method in _METHODS}
    styles[NOTHING] = ("nothing sent: the cores' limit", "#aaaaaa")
    for name, found in times.items():
        title, colour = styles[name]
        dashed = "--" if name == NOTHING else "-"
        axes.plot(list(found), list(found.values()), color=colour, linestyle=dashed, marker="o", label=title)
    axes.set_xticks(list(study.scale.world_sizes))
    # Room for the legend.
    axes.set_ylim(0, 1.5 * axes.get_ylim()[1])
    plots.save(figure, study.picture("16"))
