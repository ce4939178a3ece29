"""The commands ``thinwire demo`` and ``thinwire compare``: options and help, which wait for no import of PyTorch."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from thinwire_tools import lab, plots
from thinwire_tools.compare.losses import PATTERN, compiled
from thinwire_tools.compare.statistics import CONTROL, need_scipy
from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.lab.units import parse_rates
from thinwire_tools.results import OutputFile


def demo(
    *,
    rate: str = "100mbit",
    ranks: int = 2,
    steps: int | None = None,
    smoke: bool = False,
    out: Path = Path("demo"),
    json: OutputFile = None,
    seed: int = 0,
) -> int:
    """Train over a slow link with gradients in fp32, bf16, PowerSGD and thinwire's 4 bits, and by local updates.

    A byte-level GPT learns the Python standard library's own source on ranks that a slow link joins, emulated on this
    machine. All variants start from the same weights, see the same batches, and take turns. Takes a few minutes on
    two cores. Exits with 1 if a result is wrong: bytes that are not the format's, replicas that differ, a loss that is
    worse than its margin, or a control that is not worse. A speed that this busy machine does not show is no error.

    Examples:
      thinwire demo
      thinwire demo --rate 1gbit --ranks 4
      thinwire demo --smoke

    Args:
        rate: of each rank's link, both ways (100mbit, 1gbit ...).
        ranks: number of ranks, each in a network namespace of its own.
        steps: training steps of each variant.
        smoke: a tiny model and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the picture and the figures.
        json: write the figures to this file instead of OUT/demo.json.
        seed: seed of the initial weights, the batches and the rounding.
    """
    from thinwire_tools.compare.demo import JUDGED, Demonstration, Turns, conclude, demo_task
    from thinwire_tools.compare.paired import train_in_turns
    from thinwire_tools.compare.tasks import library_text
    from thinwire_tools.compare.variants import BASELINE, CONTROL_RULES, VARIANTS

    console = Console(highlight=False)
    with ends_command(ValueError, RuntimeError, OSError):
        task = demo_task(smoke, steps, seed)
        parse_rates(rate, ranks)
        if ranks < 2:
            raise ValueError("a demo needs at least 2 ranks: with one, nothing is sent")
        text = library_text()
        out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "rate": rate,
        "ranks": ranks,
        "task": {**asdict(task), "seed": seed},
        "text": {"digest": text.digest, "num_files": text.num_files},
        "parameters": sum(parameter.numel() for parameter in task.build(seed).parameters()),
        "control": CONTROL_RULES,
    }
    with ExitStack() as stack:
        if missing := lab.unavailable():
            network, about["link"] = None, f"loopback: {missing}"
            where = (
                f"[yellow]No slow network can be made here: {escape(missing)}\nThe ranks talk over loopback, so the "
                "comparison is about bytes and loss only, not about time.[/]"
            )
        else:
            network = stack.enter_context(lab.Network(ranks, rate=rate))
            about["link"] = network.describe()
            where = f"Link: {escape(lab.link_text(about['link']))}"
        console.print(
            f"[bold]thinwire demo[/]: {ranks} ranks train a byte-level GPT on Python's standard library by "
            f"{len(VARIANTS)} methods: same start, same batches, {task.steps} steps. Ctrl-C leaves nothing behind.\n"
            f"{where}"
        )
        watcher = stack.enter_context(Turns(console, task.steps))
        runs, failures = train_in_turns(task, VARIANTS, seed=seed, num_ranks=ranks, network=network, watcher=watcher)
    if BASELINE in failures:
        raise failures[BASELINE]
    if failures:
        about["failures"] = {name: str(failure) for name, failure in failures.items()}
    judged = (rate, ranks, task) == JUDGED
    shown = Demonstration.of(runs, about, judged=judged, shaped=network is not None)
    with ends_command(ValueError):
        return conclude(console, shown, out, json or out / "demo.json")


def compare(
    variants: tyro.conf.Positional[tuple[str, ...]] = ("minmax(bits=4, bucket=128)",),
    *,
    seeds: int = 3,
    within: str = "1%",
    control: str | None = CONTROL,
    size: Literal["small", "demo"] = "small",
    steps: int | None = None,
    ranks: int = 2,
    rate: str | None = None,
    learning_rate: float | None = None,
    measure: int = 0,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Compare the loss that training ends at with compressed gradients to that with uncompressed (fp32) ones.

    Paired runs of a byte-level GPT over several seeds, a confidence interval of the difference, and a control that must
    fail, so that "within 1 %" means something: exits with 1 if the control does not.

    Examples:
      thinwire compare "minmax(bits=4, bucket=128)" "ef(minmax(bits=2))"
      thinwire compare 4bit --seeds 5 --within 0.5% --rate 100mbit --json out.json
      thinwire compare "topk(density=0.1)" "topk(density=0.1) with lgreco(every=25)"
      thinwire compare --smoke

    Args:
        variants: specs of compressors; "SPEC with POLICY" has a policy (lgreco, kmeans, accordion ...) choose for each
            layer while training continues; with "alone" ranks send nothing.
        seeds: number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: how much higher a loss may be and still be the same: 1% or 0.01.
        control: a spec that must fail; None for none, which leaves open whether this training shows damage at all.
        size: of the GPT: small (0.8 M parameters) or demo (4.8 M).
        steps: training steps of each run.
        ranks: number of ranks.
        rate: of each rank's link (100mbit, 1gbit ...), emulated; without it loopback, where time means nothing.
        learning_rate: the highest one, for all variants, instead of the size's own.
        measure: every so many steps, also measure the error of the received mean (alpha).
        smoke: a tiny model and few steps, under a minute: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    from thinwire_tools.compare.compare import conduct, make_task

    with ends_command(ValueError):
        if script := next((text for text in variants if text.endswith(".py")), None):
            before = "".join(f'"{text}" ' for text in variants[: variants.index(script)])
            raise ValueError(f"a script comes after two dashes: thinwire compare {before}-- {script}")
        task = make_task("smoke" if smoke else size, steps, learning_rate)
    options = {"control": control, "num_ranks": ranks, "rate": rate, "measure": measure}
    comparison = conduct("thinwire compare", task, variants, seeds=seeds, within=within, json=json, **options)
    return 0 if comparison.sensitive else 1


def compare_script(
    script: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    variants: tyro.conf.Positional[tuple[str, ...]] = ("minmax(bits=4, bucket=128)",),
    *,
    seeds: int = 3,
    within: str = "1%",
    control: str | None = CONTROL,
    ranks: int = 2,
    rate: str | None = None,
    pattern: str = PATTERN,
    log: str | None = None,
    key: str = "loss",
    timeout: float = 3600.0,
    plot: OutputFile = None,
    json: OutputFile = None,
) -> int:
    """Compare the loss that your own script ends at with compressed communication to that without.

    The script runs once as it is and once with each compressor for every seed, on ranks of this machine, without a
    change to it. The differences are paired by seed and judged by a t-test; a control must fail, so that "within 1 %"
    means something: exits with 1 if it does not.

    In the script's command {seed} stands for the seed and {out} for a folder of each run's own. The seed is also given
    to the generators of Python, NumPy and PyTorch before the script starts. The loss is the mean of the last tenth of
    the losses that rank 0 prints, or that a log has.

    Examples:
      thinwire compare -- train.py --steps 200 --seed {seed}
      thinwire compare 4bit powersgd --rate 100mbit -- train.py --seed {seed}
      thinwire compare 8bit --pattern "val ([0-9.]+)" -- train.py
      thinwire compare --log {out}/log.json --key eval_loss -- train.py --out {out}

    Args:
        script: arguments for python, after two dashes.
        variants: compressors: presets or specs; "SPEC with POLICY" has a policy choose each layer's own.
        seeds: number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: how much higher a loss may be and still be the same: 1% or 0.01.
        control: a spec that must fail; None for none.
        ranks: number of ranks.
        rate: rate of each rank's link (100mbit, 1gbit ...), emulated; without it loopback.
        pattern: regular expression with one group, which finds the loss in a line that rank 0 prints.
        log: read losses from this JSON or JSON Lines file, or folder of TensorBoard's, instead.
        key: name of the loss in the log.
        timeout: seconds after which a run has failed.
        plot: write the curves to this file, such as curves.svg.
        json: write the figures to this file.
    """
    from thinwire_tools.compare.compare import parse_share, show, write_figures
    from thinwire_tools.compare.comparison import Run, Side
    from thinwire_tools.compare.paired import check_margin, named
    from thinwire_tools.compare.script import AS_IT_IS, Runs, ScriptComparison, check_seeds, read_losses
    from thinwire_tools.compare.variants import ALONE, BASELINE

    console = Console(highlight=False)
    with ends_command(ValueError, ImportError):
        if seeds < 1 or ranks < 2 or not script:
            raise ValueError("needs a script, at least one seed and 2 ranks: thinwire compare --seeds 3 -- train.py")
        if plot is not None:
            plots.need_matplotlib()
        need_scipy()
        specs, control = named(variants, control)
        if ALONE in specs:
            raise ValueError("ranks of a script always communicate: leave --, and alone is compared on the small GPT")
        margin = parse_share(within)
        check_margin(margin)
        compiled(pattern)
        check_script(without_python(script))
        names = [BASELINE, *specs, *([control] if control else [])]
        trained: dict[str, list[Run]] = {name: [] for name in names}
        told = partial(read_losses, pattern=pattern, log=log, key=key)
        with Runs(script, ranks, rate, told, timeout) as runs:
            for seed in range(seeds):
                for name in names:
                    run = runs.train(None if name == BASELINE else name, seed)
                    trained[name].append(run)
                    title = AS_IT_IS if name == BASELINE else name
                    text = f"seed {seed}, {title}: loss {run.val_loss:.4f} in {sum(run.step_s):.1f} s"
                    console.print(text, style="dim", markup=False, soft_wrap=True)
                    check_seeds(trained[BASELINE])
            for run in trained[BASELINE]:
                run.payload_bytes = [runs.dense_bytes]
        sides = {name: Side(name, math.nan, tuple(trained[name])) for name in names}
        found = ScriptComparison(
            seeds=tuple(range(seeds)),
            margin=margin,
            shaped=rate is not None,
            baseline=replace(sides[BASELINE], title=AS_IT_IS),
            variants=tuple(sides[spec] for spec in specs),
            control=sides[control] if control else None,
            about={"script": list(script), "control": control, "margin": margin},
        )
        show(console, found)
    if plot is not None:
        found.picture(plot, "your training", "losses read", "loss")
        console.print(f"Curves: {plot}", soft_wrap=True, markup=False)
    write_figures(console, "thinwire compare", found, found.about, json)
    return 0 if found.sensitive else 1


def every(
    *,
    seeds: int = 3,
    within: str = "1%",
    size: Literal["tiny", "small"] = "tiny",
    steps: int | None = None,
    ranks: int = 2,
    measure: int = 10,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Train a GPT with every compressor: held-out loss, difference to fp32's, bytes, error of the mean (alpha).

    Paired runs as in `thinwire compare`, at fp32's learning rate, by AdamW; then the biased ones without their error
    feedback. In the row "alone" ranks send nothing: a compressor that ends above it is worse than no network. Exits
    with 1 if the control, which must fail, does not.

    Examples:
      thinwire compare every
      thinwire compare every --steps 600 --json every.json
      thinwire compare every --smoke

    Args:
        seeds: number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: how much higher a loss may be and still be the same: 1% or 0.01.
        size: of the GPT: tiny (0.4 M parameters, 150 steps) or small (that of `thinwire compare`).
        steps: of each run, in place of the size's.
        ranks: number of ranks, over loopback.
        measure: steps between two measurements of alpha.
        smoke: a tiny model, few compressors, few steps and one seed: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    from thinwire_tools.compare.compare import conduct
    from thinwire_tools.compare.tasks import SIZES
    from thinwire_tools.compare.variants import ALONE, EVERY, SOME, WITHOUT

    specs, task = (SOME, SIZES["smoke"]) if smoke else (EVERY, SIZES[size])
    if smoke:
        task = replace(task, steps=20, probe_every=10, held_out_windows=32, probe_windows=8)
    if steps is not None:
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    variants = [ALONE, *specs, *(WITHOUT[spec] for spec in specs if spec in WITHOUT)]
    options = {"control": CONTROL, "num_ranks": ranks, "measure": measure}
    seeds = 1 if smoke else seeds
    found = conduct("thinwire compare every", task, variants, seeds=seeds, within=within, json=json, **options)
    return 0 if found.sensitive else 1
