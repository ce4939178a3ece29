"""Write the figures of README.md and docs/ from the JSON files in benchmarks/. ``--check`` says if they are new."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiment_pages import experiment, sharded
from figures import BENCHMARKS, ROOT, Figures, bullets, table

from experiments.framework import power as power_tables, results_page
from experiments.framework.catalog import CATALOG
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.lab.units import format_rate, parse_rate

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
NESTED = ("sra", "hierarchical(inside=dense, across=slices)", "hierarchical(inside=dense, across=leaders)")
NESTED += ("hierarchical(inside=same, across=slices)",)
ONE_NODE = ("sra", "ring", "allgather")
TITLES = {
    "thinwire": "**thinwire, 4 bits**",
    "fp32": "DDP, fp32",
    "bf16": "DDP, bf16 gradients",
    "powersgd": "PyTorch's PowerSGD, rank 4",
    "low-rank": "thinwire's PowerSGD, rank 4",
    "local": "thinwire's local updates, every 8 steps in 2 bits",
    "muloco": "**local updates with Muon**, every 8 steps in 2 bits",
    "muon": "control: DDP, fp32, with Muon",
    "noop": "nothing sent (the ceiling)",
    "alone": "training alone (no communication)",
    "control": "control: 1 bit, no error feedback",
}


def headline() -> str:
    """Claims one by one, each against its own control."""
    short, local = Figures(BENCHMARKS / "demo.json"), Figures(BENCHMARKS / "local.json")
    over_100 = sorted([short.get("speedup_over_fp32/thinwire") or 0.0, _speed(local, "thinwire")])
    over_1000 = Figures(BENCHMARKS / "step-1gbit.json").get("speedup_over_fp32") or 0.0
    return (
        "**thinwire compresses what distributed PyTorch training sends over slow networks**: gradients under DDP, "
        "weights and gradients under FSDP2, activations between pipeline stages. On CPU ranks and emulated links:\n\n"
        f"- **Steps.** With gradients in 4 bits they are {over_100[0]:.1f} to {over_100[1]:.1f} times as fast as those "
        f"of DDP in fp32 over 100 Mbit/s, and {over_1000:.1f} times over 1 Gbit/s.\n"
        "- **Loss.** With gradients in 4 bits it ends where the same training in fp32 ends: the difference over "
        f"{local.record['about']['seeds']} seeds is {local.bounded('val_loss_above_fp32/thinwire')}; in brackets, a "
        "90 % confidence interval.\n"
        "- **Slower links.** With [local updates](docs/local.md), ranks train alone for some steps and then exchange "
        f"what they have learned, in {_fewer(local, 'local')} times fewer bytes than DDP in fp32. That costs loss: "
        f"{local.bounded('val_loss_above_fp32/local')} with AdamW."
    )


def _speed(figures: Figures, name: str) -> float:
    """Steps of a variant over 100 Mbit/s, in multiples of the speed of DDP's in fp32."""
    return (figures.get("100mbit/step_s/fp32") or 0.0) / (figures.get(f"100mbit/step_s/{name}") or math.inf)


def _fewer(figures: Figures, name: str) -> str:
    sent = [figures.get(f"100mbit/sent_bytes/{each}") or 1.0 for each in ("fp32", name)]
    return f"{sent[0] / sent[1]:.0f}"


_OVER_100_MBIT = {
    "thinwire": ("local", "**4 bits**", "fp32"),
    "in-optimizer": (
        "in-optimizer",
        "**2 bits in `CompressedAdamW`**, at twice the learning rate of AdamW, its control",
        "fp32",
    ),
    "powersgd": ("in-optimizer", "PyTorch's PowerSGD, rank 4", "fp32"),
    "local": ("local", "local updates, every 8 steps in 2 bits", "fp32"),
    "muloco": ("local", "local updates with Muon, every 8 steps in 2 bits", "muon"),
    "alone": ("local", "control: training alone, nothing sent", "fp32"),
}
"""Variants of ``bench local``: the record that has them, a title, and their own control."""

_OWN_OPTIMIZER = {
    "AdamW, 4 bits": ("**4 bits**", "AdamW, fp32"),
    "CompressedAdamW, 2 bits, buckets of 64": ("**2 bits in `CompressedAdamW`**", "CompressedAdamW, fp32"),
    "Muon, 2 bits": ("**2 bits, Muon**", "Muon, fp32"),
    "DiLoCo, AdamW, 2 bits, every 25": ("local updates, every 25 steps in 2 bits", "AdamW, fp32"),
    "DiLoCo, Muon, 2 bits, every 10": ("local updates with Muon, every 10 steps in 2 bits", "Muon, fp32"),
    "alone": ("control: training alone", "AdamW, fp32"),
}
"""Variants of ``bench training``, a title, and the same optimizer in fp32."""


def longer() -> str:
    """Trainings that are long enough to judge the loss, each beside its own control."""
    local, training = Figures(BENCHMARKS / "local.json"), Figures(BENCHMARKS / "training.json")
    short = []
    for name, (record, title, control) in _OVER_100_MBIT.items():
        figures = Figures(BENCHMARKS / f"{record}.json")
        sent = f", {_fewer(figures, name)} times fewer bytes" if figures.get(f"100mbit/sent_bytes/{name}") else ""
        difference = _against(figures, f"val_loss/{name}", f"val_loss/{control}", "by_seed")
        short.append(f"{title}: {_speed(figures, name):.1f} times the steps{sent}, loss {difference}")
    long = [
        f"{title}: {_against(training, f'loss/{name}', f'loss/{control}', 'losses')}"
        for name, (title, control) in _OWN_OPTIMIZER.items()
    ]
    muon, ours = (training.bounded(f"difference/{name}, fp32") for name in ("Muon", "CompressedAdamW"))
    about, task = local.record["about"], local.record["about"]["task"]
    return (
        f"Two byte-level GPTs, {about['seeds']} seeds; in brackets, 90 % confidence intervals. Held-out losses are "
        "against the same optimizer in fp32: AdamW, or Muon (`thinwire.optim.Muon`), which steps along orthogonalized "
        "momenta, where that is named. Steps and bytes are against DDP in fp32 with AdamW.\n\n"
        f"Over 100 Mbit/s, {task['steps']} steps ([more](docs/local.md#measured)):\n\n{bullets(short)}\n"
        f"Over 1000 steps, each method at its best learning rate ([more](docs/compressed-adamw.md#loss-and-bytes)): "
        f"{'; '.join(long)}.\n\n"
        "What an optimizer gains by itself is another matter: in fp32, against AdamW in fp32, Muon ends at "
        f"{muon}, and `CompressedAdamW` at {ours}."
    )


def _against(figures: Figures, name: str, control: str, runs: str) -> str:
    """The difference of a variant's losses to its control's, seed by seed, and its interval."""
    found = estimate(relative_differences(*(figures.rows[each][runs] for each in (name, control))))
    return f"{100 * found.mean:+.2f} % ({100 * found.lower:+.2f} to {100 * found.upper:+.2f})"


def demo() -> str:
    figures = Figures(BENCHMARKS / "demo.json")
    task = figures.record["about"]["task"]
    fp32 = figures.get("steps_per_s/fp32") or 1.0
    rows = []
    for name, title in TITLES.items():
        speed, loss = figures.get(f"steps_per_s/{name}"), figures.get(f"val_loss/{name}")
        sent = figures.get(f"payload_bytes/{name}")
        # Each against the same optimizer in fp32: what Muon gains by itself is none of a compressor's doing.
        control = figures.get("val_loss/muon" if name == "muloco" else "val_loss/fp32") or 1.0
        if speed is None and loss is None:
            continue
        rows.append(
            [
                title,
                f"{speed:.2f}" if speed else "",
                f"{speed / fp32:.1f}x" if speed else "",
                f"{sent / 1e6:.0f} MB" if sent else ("0" if name in ("noop", "alone") else ""),
                f"{loss:.4f}" if loss else "",
                f"{100 * (loss / control - 1):+.2f} %" if loss and name not in ("fp32", "muon") else "",
            ]
        )
    rows.sort(key=lambda row: -float(row[1] or 0))
    head = [
        "",
        "steps/s",
        "speed-up",
        "bytes sent per rank",
        "held-out loss (nats/byte)",
        "against its optimizer in fp32",
    ]
    return (
        "`thinwire demo`: two ranks train a byte-level GPT of "
        f"{figures.record['about']['parameters'] / 1e6:.1f} million parameters on the Python standard library's "
        "source over an emulated 100 Mbit/s link, from the same weights and with the same batches.\n\n"
        f"{table(head, rows)}\n\n![Held-out loss against time](benchmarks/demo/loss.svg)\n\n"
        "Losses are means of −ln of the probability that the model gave each byte (nats per byte). "
        "The rows without Muon are trained with AdamW. The curves are losses on "
        f"{task['probe_windows']} of the {task['held_out_windows']} held-out windows of the table. {figures.machine}."
    )


def allreduce() -> str:
    figures, rows = Figures(BENCHMARKS / "algorithms.json"), []
    for ranks, rate, rtt in itertools.product((2, 4), RATES, ("0ms", "20ms")):
        cell = f"{ranks} ranks/1 a node/{rate}/{rtt}/25 MB/"
        ms = [1e3 * (figures.get(f"{cell}seconds/{name}") or 0) for name in ("gloo", "sra/group", "bare/sra/group")]
        if not all(ms):
            continue
        rows.append(
            [
                f"{ranks} ranks, {RATES[rate]}" + ("" if rtt == "0ms" else f", +{rtt.replace('ms', ' ms')}"),
                *(f"{value:.1f} ms" for value in ms),
                f"{ms[0] / ms[1]:.2f}x",
                f"{ms[1] / ms[2]:.2f}x",
            ]
        )
    head = ["25 MB", "gloo fp32", "thinwire", "its messages, bare", "against gloo", "against bare messages"]
    return (
        "`python -m experiments bench algorithms`: one all-reduce of a 25 MB gradient, in 4 bits, beside gloo's in "
        "fp32 and beside an exchange of the same messages with nothing done to them; "
        f"links with and without a round-trip time. "
        f"[All collective algorithms and transports](docs/algorithms.md).\n\n{table(head, rows)}\n\n{figures.machine}."
    )


def allreduce_long() -> str:
    runs = [Figures(BENCHMARKS / f"allreduce-{name}.json") for name in ("small", "long")]
    about, head, rows = runs[0].record["about"], [f"{runs[0].record['about']['ranks']} ranks"], {}
    for figures in runs:
        head += [f"{figures.record['about']['size_mb']:g} MB", "against gloo", "against bare messages"]
        gloo = figures.get("seconds/gloo") or math.nan
        rows.setdefault("gloo fp32", []).extend((f"{1e3 * gloo:.1f} ms", "1.00x", ""))
        if (fp32 := figures.get("seconds/fp32")) is not None:
            rows["thinwire, fp32"] = [f"{1e3 * fp32:.1f} ms", f"{gloo / fp32:.2f}x", ""]
        for name in (name.removeprefix("times_bare/") for name in figures.rows if name.startswith("times_bare/")):
            seconds, times_bare = (figures.get(f"{what}/{name}") or math.nan for what in ("seconds", "times_bare"))
            shown = (f"{1e3 * seconds:.1f} ms", f"{gloo / seconds:.2f}x", f"{times_bare:.2f}x")
            rows.setdefault(f"`{name.removesuffix('/group')}`", []).extend(shown)
    return (
        f"`thinwire bench allreduce`: all-reduces among {about['ranks']} ranks in 4 bits, over {RATES[about['rate']]} "
        f"with a round-trip time of {about['rtt'].replace('ms', ' ms')}.\n\n"
        f"{table(head, [[name, *cells, *[''] * (len(head) - 1 - len(cells))] for name, cells in rows.items()])}\n\n"
        f"{runs[0].machine}."
    )


def algorithms() -> str:
    figures = Figures(BENCHMARKS / "algorithms.json")
    flat = ("sra/group", "ring/group", "tree/group", "allgather/group", "parameter_server/group")
    parts = []
    for size in figures.record["about"]["sizes_mb"]:
        rows = []
        for ranks, rate, rtt in itertools.product((2, 4), RATES, ("0ms", "20ms")):
            cell = f"{ranks} ranks/1 a node/{rate}/{rtt}/{size:g} MB/"
            if figures.get(f"{cell}seconds/gloo") is None:
                continue
            rows.append(
                [
                    f"{ranks} ranks, {RATES[rate]}" + ("" if rtt == "0ms" else ", +20 ms"),
                    *_speedups(figures, cell, flat),
                ]
            )
        head = [f"{size:g} MB, a rank on each node", "gloo fp32", *(variant.split("/")[0] for variant in flat)]
        parts.append(table(head, rows))
    cell = f"4 ranks/1 a node/{next(iter(RATES))}/0ms/25 MB/"
    rows = []
    for variant in flat:
        by_node = figures.rows[f"{cell}crossing_bytes/{variant}"]["by_node"]
        counted = (figures.get(f"{cell}interface_bytes/{variant}") or 0) / sum(by_node)
        variance = (figures.get(f"{cell}variance/{variant}") or 0) / (figures.get(f"{cell}variance/sra/group") or 1)
        sent = " / ".join(f"{value / 1e6:.2f}" for value in by_node)
        rows.append([variant.split("/")[0], f"{sent} MB", f"{counted:.3f}", f"{variance:.2f}"])
    head = ["4 ranks, 25 MB", "sent by each rank", "on the interfaces / formula", "variance of the mean / sra's"]
    parts.append(table(head, rows))
    for each_node, rates, variants, title in (
        (2, RATES, NESTED, "4 ranks, two to a node"),
        (4, {"none": "no limit"}, ONE_NODE, "4 ranks on one node"),
        (2, {"none": "no limit"}, ONE_NODE, "2 ranks on one node"),
    ):
        ranks = 4 if rates is RATES else each_node
        rows = []
        for size, (rate, text) in itertools.product(figures.record["about"]["sizes_mb"], rates.items()):
            cell = f"{ranks} ranks/{each_node}  a node/{rate}/0ms/{size:g} MB/".replace("  ", " ")
            rows += [
                [
                    f"{size:g} MB, {text}",
                    "fp32, gloo",
                    f"{1e3 * figures.rows[f'{cell}seconds/gloo']['value']:.1f}",
                    "",
                    "",
                ]
            ]
            for variant in variants:
                by_group, shared = (
                    figures.get(f"{cell}seconds/{variant}/{kind}")
                    for kind in ("group", "auto" if each_node < ranks else "shared")
                )
                if by_group and shared:
                    rows.append(
                        ["", variant, f"{1e3 * by_group:.1f}", f"{1e3 * shared:.1f}", f"{by_group / shared:.2f}x"]
                    )
        parts.append(table([title, "", "gloo, ms", "shared memory inside a node, ms", "shared memory gains"], rows))
    return "\n\n".join(parts) + f"\n\n{figures.machine}."


def _speedups(figures: Figures, cell: str, variants: tuple[str, ...]) -> list[str]:
    gloo = figures.get(f"{cell}seconds/gloo") or 0
    cells = [f"{1e3 * gloo:.1f} ms"]
    for variant in variants:
        seconds, times_bare = figures.get(f"{cell}seconds/{variant}"), figures.get(f"{cell}times_bare/{variant}")
        bare = f" ({times_bare:.2f})" if times_bare else ""
        cells.append(f"{gloo / seconds:.2f}x{bare}" if seconds else "")
    return cells


def step() -> str:
    rows, machine = [], ""
    for name, where in (("1gbit", "1 Gbit/s"), ("loopback", "loopback")):
        figures = Figures(BENCHMARKS / f"step-{name}.json")
        machine = figures.machine
        batch = figures.rows["share_of_ceiling/fp32"]["batch"]
        shares = [f"{figures.get(f'share_of_ceiling/{method}'):.0%}" for method in ("fp32", "thinwire")]
        rows.append([where, str(batch), *shares, f"{figures.get('speedup_over_fp32'):.2f}x"])
    head = ["2 ranks", "windows per rank", "stock DDP", "thinwire", "thinwire against stock"]
    figures = Figures(BENCHMARKS / "step-1gbit.json")
    batch = figures.rows["share_of_ceiling/thinwire"]["batch"]
    taken = figures.get(f"step_s/thinwire/batch{batch}") - figures.get(f"step_s/noop/batch{batch}")
    worked = figures.get("processor_s/thinwire") - figures.get("processor_s/noop")
    return (
        "`thinwire bench step`: training steps of the same GPT, as a share of the speed with nothing sent. Over "
        f"loopback, with declining on, as it is by default.\n\n{table(head, rows)}\n\n"
        f"Over 1 Gbit/s a step takes {1e3 * taken:.0f} ms longer than with nothing sent, and {1e3 * worked:.0f} ms "
        "more processor time of a rank, whose threads share one core with its training here: cores that training "
        f"leaves idle would take it.\n\n{machine}."
    )


KERNELS = (
    "natural, encode",
    "natural, decode",
    "range float of 10 bits, encode",
    "range float of 10 bits, decode",
    "round to int8",
    "top-k, exact, 1 %",
    "top-k, sampled, 1 %",
    "torch.topk, 1 %",
    "fft, encode",
    "fft, decode",
)
"""Rows of the table of kernels beside those of the default format."""


def kernels() -> str:
    runs = {threads: Figures(BENCHMARKS / f"kernels-{threads}.json") for threads in (1, 2)}
    first = runs[1]
    body = []
    for name, row in first.rows.items():
        same_size = "x_copy" in row and row["numel"] == first.rows["copy_"]["numel"]
        if same_size and (name == "copy_" or "4 bits/128" in name or name in KERNELS):
            body.append([f"`{name}`", *(f"{run.rows[name]['x_copy']:.2f}x" for run in runs.values())])
    head = ["25 MB, in multiples of `torch.Tensor.copy_` on as many bytes", "1 thread", "2 threads"]
    level = first.record["about"]["cpu_level"]
    return f"`thinwire bench kernels`, at {level}:\n\n{table(head, body)}\n\n{first.machine}."


COMPRESSORS = {
    "4-bit min-max (the default)": "minmax(bits=4, bucket=128)",
    "4-bit QSGD": "qsgd(bits=4, bucket=128)",
    "4-bit max-abs": "maxabs(bits=4, bucket=128)",
    "TernGrad, clipped": "terngrad(clip=2.5)",
    "natural": "natural()",
    "8-bit range float": "rangefloat(bits=8, mantissa=auto)",
    "bf16": "cast(bf16)",
    "1-bit SGD": "onebit(bucket=512)",
    "sign": "sign(majority=False)",
    "top-k, 1 %": "topk(density=0.01)",
    "top-k, 1 %, 8-bit values": "topk(density=0.01) | minmax(bits=8, bucket=128)",
    "random k, 10 %": "randk(density=0.1)",
    "FFT, 15 %, 10 bits": "fft(theta=0.85, bits=10)",
    "PowerSGD, rank 4": "powersgd(rank=4)",
}
"""Rows of the table of compressors, by spec as both benchmarks name it."""


def _message(figures: Figures, spec: str) -> list[str]:
    """Cells about one message of a compressor: bits per element, error, and the speeds of encoding and decoding."""
    size, error = 8 * (figures.get(f"bytes_per_element/{spec}") or 0), figures.get(f"relative_error/{spec}")
    speeds = (f"{figures.get(f'{direction}_x_copy/{spec}'):.3f}x" for direction in ("encode", "decode"))
    return [f"{size:.2f}", f"{error:.3f}", *speeds]


def compressors() -> str:
    figures, trained = Figures(BENCHMARKS / "compressors.json"), Figures(BENCHMARKS / "compare-every.json")
    about, rows = trained.record["about"], []
    for title, spec in COMPRESSORS.items():
        facts = figures.rows[f"relative_error/{spec}"]
        difference, alpha = trained.get(f"difference/mean/{spec}"), trained.get(f"alpha/{spec}")
        without = trained.get(f"difference/mean/{spec.removesuffix(')')}, feedback=False)")
        rows.append(
            [
                title,
                *_message(figures, spec),
                "yes" if facts["unbiased"] else "EF" if facts["feedback"] else "no",
                "diverged" if difference is None else f"{100 * difference:+.2f} %",
                "" if without is None else f"{100 * without:+.2f} %",
                # With error feedback it would count what earlier steps left, too, and a step's error it is not.
                "" if alpha is None or facts["feedback"] else f"{alpha:.2f}",
            ]
        )
    if (alone := trained.get("difference/mean/alone")) is not None:
        rows.append(["training alone (no communication)", "0.00", "", "", "", "", f"{100 * alone:+.2f} %", "", ""])
    head = ["", "bits per element", "error", "encode", "decode", "unbiased", "held-out loss", "without EF", "alpha"]
    return (
        "`python -m experiments bench compressors`: relative error of one message of a real gradient, all bytes "
        "counted, speeds in multiples of `torch.Tensor.copy_`. EF: biased, trained with error feedback. "
        "`thinwire compare every`: held-out loss of a small GPT under AdamW against fp32's, "
        f"{about['num_ranks']} ranks, {about['task']['fields']['steps']} steps, {len(about['seeds'])} seeds, at fp32's "
        "learning rate; alpha: error of the mean that arrives, without EF (with it, what arrives holds what earlier "
        "steps left).\n\n"
        f"{table(head, rows)}\n\n![Error against bytes](benchmarks/compressors.svg)\n\n{figures.machine}."
    )


FFT_BLOCKS = {
    "the whole layer, as in the paper": "fft(theta=0.85, bits=10, block=whole)",
    "4096": "fft(theta=0.85, bits=10, block=4096)",
    "512 (the default)": "fft(theta=0.85, bits=10)",
    "256": "fft(theta=0.85, bits=10, block=256)",
}
"""Rows of the table of blocks, by spec."""


def fft_blocks() -> str:
    figures, body = Figures(BENCHMARKS / "compressors.json"), []
    for title, spec in FFT_BLOCKS.items():
        body.append([title, *_message(figures, spec)])
    head = ["elements of a block", "bits per element", "error", "encode", "decode"]
    about = "`python -m experiments bench compressors`, θ = 0.85: one message of a small GPT's gradient; speeds in "
    return f"{about}multiples of `torch.Tensor.copy_`:\n\n{table(head, body)}\n\n{figures.machine}."


def integers() -> str:
    figures = Figures(BENCHMARKS / "integers.json")
    about, rows = figures.record["about"], []
    fp32 = figures.get("seconds/fp32") or math.nan
    for spec in (name.removeprefix("seconds/") for name in figures.rows if name.startswith("seconds/")):
        seconds, codec, sent, bits = (
            figures.get(f"{quantity}/{spec}") or 0.0 for quantity in ("seconds", "codec_s", "sent_bytes", "bits")
        )
        label = "fp32, gloo's all-reduce" if spec == "fp32" else f"`{spec}`"
        speed = f"{fp32 / seconds:.1f}x"
        rows.append([label, f"{1e3 * seconds:.0f}", speed, f"{1e3 * codec:.0f}", f"{sent / 1e6:.2f}", f"{bits:.2f}"])
    head = ["all-reduce", "ms", "speed", "of these, encoding and decoding", "MB that a rank sends", "bits a coordinate"]
    return (
        f"`python -m experiments bench integers`: {about['size_mb']:g} MB, {about['ranks']} ranks over "
        f"{RATES[about['rate']]} links, medians of {len(figures.rows['seconds/fp32']['all'])}.\n\n"
        f"{table(head, rows)}\n\n"
        "What is trained with them (in brackets, 90 % confidence intervals):\n\n"
        f"{_trained('integers.json', 'a small GPT, AdamW')}\n\n{figures.machine}."
    )


def _trained(record: str, title: str) -> str:
    figures = Figures(BENCHMARKS / record)
    about, rows = figures.record["about"], []
    for name in (name.removeprefix("held_out_loss/") for name in figures.rows if name.startswith("held_out_loss/")):
        loss, sent = figures.get(f"held_out_loss/{name}") or 0.0, figures.get(f"bytes_per_step/{name}") or 0.0
        mean, lower, upper = (figures.get(f"difference/{bound}/{name}") for bound in ("mean", "lower", "upper"))
        known = mean is not None and lower is not None and upper is not None
        difference = f"{100 * mean:+.1f} % ({100 * lower:+.1f} to {100 * upper:+.1f})" if known else ""
        label = TITLES.get(name.partition("/")[0], f"`{name}`")
        rows.append([label, f"{loss:.4f}", difference, f"{sent / 1e3:.1f}"])
    first = f"{title}, {about['ranks']} ranks, {about['seeds']} seeds"
    return table([first, "held-out loss", "against fp32's", "kB sent per step"], rows)


def pipelines() -> str:
    figures = Figures(BENCHMARKS / "pipelines.json")
    about, rows = figures.record["about"], []
    methods = ("PyTorch", "raw", "fw3 bw6")
    for rate in about["times"]:
        for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
            steps = [figures.get(f"step_s/{method}/{schedule}/{rate}") or 0.0 for method in methods]
            rows.append([RATES[rate], schedule, *(f"{1e3 * step:.0f} ms" for step in steps)])
    forward, backward, _ = about["layer_ms"]
    layers = " and over ".join(
        f"{RATES[rate]} {forward * times:g} ms forward and {backward * times:g} ms backward"
        for rate, times in about["times"].items()
    )
    head = ["links", "schedule", "PyTorch's stages", "thinwire's, uncompressed", "3 bits forward, 6 back"]
    return (
        f"`python -m experiments bench pipelines`: {about['ranks']} ranks, {about['micro_batches']} micro-batches, "
        f"{about['activation_bytes'] / 1e6:.2f} MB of activations each; two layers per rank, over {layers}, asleep as "
        f"if an accelerator computed them.\n\n{table(head, rows)}\n\n{figures.machine}."
    )


def stores() -> str:
    figures = Figures(BENCHMARKS / "stores.json")
    about, rows = figures.record["about"], []
    for name, schedule, link in (key.split("/")[1:] for key in figures.rows if key.startswith("step_s/")):
        step = figures.get(f"step_s/{name}/{schedule}/{link}") or 0.0
        against = figures.bounded(f"difference/{name}/{schedule}/{link}")
        rows.append([format_rate(parse_rate(link)), schedule, name, f"{1e3 * step:.0f} ms", against])
    forward, backward, _ = about["layer_ms"]
    return (
        f"`python -m experiments bench stores`: {about['ranks']} ranks, {about['micro_batches']} micro-batches, two "
        f"layers per rank of {forward:g} ms forward and {backward:g} ms backward, 3 bits forward and 6 back; medians "
        f"and 90 % confidence intervals of {about['rounds']} runs in turn.\n\n"
        f"{table(['links', 'schedule', 'messages kept', 'a step', 'against nothing kept'], rows)}\n\n{figures.machine}."
    )


_NOTHING = "nothing sent"


def doctor() -> str:
    return _predictions(
        BENCHMARKS / "doctor.json",
        "`python -m experiments bench doctor`: steps of the demo's GPT on 2 ranks, predicted / taken (error). "
        "Predictions come from a model that trains uncompressed and from probes; they know none of "
        "the steps that they are held against.",
    )


def doctor_fsdp() -> str:
    return _predictions(
        BENCHMARKS / "doctor-fsdp.json",
        "`python -m experiments bench doctor --sharded`: the same of the demo's GPT under FSDP2.",
    )


def _predictions(path: Path, text: str) -> str:
    figures = Figures(path)
    cells = list(figures.record["about"]["cells"])
    titles = [name.split("/")[1] for name in figures.rows if name.startswith("error/") and name.endswith(cells[0])]
    rows, errors = [], {}
    for cell in cells:
        rate, rtt = cell.split("/")
        line = [f"{rate}, +{rtt}"]
        for title in titles:
            predicted, taken, error = (
                figures.get(f"{name}/{title}/{cell}") or 0.0 for name in ("predicted_step_s", "step_s", "error")
            )
            errors[cell, title] = error
            line.append(f"{1e3 * predicted:.0f} / {1e3 * taken:.0f} ms ({100 * error:+.0f} %)")
        rows.append(line)
    claimed = figures.record["about"]["claimed"]
    others = [error for (_, title), error in errors.items() if title != _NOTHING]
    least = [error for (_, title), error in errors.items() if title == _NOTHING]
    sentences = [
        _within(errors_, claimed, what)
        for errors_, what in ((others, "predictions"), (least, "steps with nothing sent"))
    ]
    return f"{text} {'. '.join(sentences)}.\n\n{table(['', *titles], rows)}\n\n{figures.machine}."


def _within(errors: Sequence[float], claimed: float, what: str) -> str:
    close = sum(abs(error) <= claimed for error in errors)
    largest = 100 * max(map(abs, errors))
    return f"{close} of {len(errors)} {what} are within {100 * claimed:.0f} %, the largest error is {largest:.0f} %"


def first_answer() -> str:
    figures = Figures(BENCHMARKS / "first-answer.json")
    installing, answer = (figures.get(f"seconds/{name}") or 0.0 for name in ("environment", "answer"))
    return f"Installing takes {installing:.0f} s, `thinwire doctor` another {answer:.0f} s, on {figures.machine}."


def optimizer() -> str:
    figures = Figures(BENCHMARKS / "optimizer.json")
    about = figures.record["about"]
    rows = [
        [
            name.removeprefix("cpu_seconds/"),
            f"{1e3 * row['value']:.1f} ms",
            f"{row['over_fused']:.2f}x",
            f"{row['of_copy']:.2f}x",
        ]
        for name, row in figures.rows.items()
    ]
    return (
        f"`python -m experiments bench optimizer`: CPU time of a step of {about['size_mb']:g} MB of fp32 weights, "
        f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}, the wire left out.\n\n"
        f"{table(['', 'CPU time', 'of fused AdamW', 'values a second, of copy_'], rows)}\n\n{figures.machine}."
    )


def training(record: str = "training.json") -> str:
    return trainings(Figures(BENCHMARKS / record), "bench training", "workers")


def deltas() -> str:
    return changes_of_weights(
        "deltas.json", "weights are gathered once a step, in buckets of 1024. *alone* is one rank without communication"
    )


def deltas_nodes() -> str:
    text = "on two nodes. Bytes are those that rank 0 sends, inside its node and to the other one"
    return changes_of_weights("deltas-nodes.json", text)


def changes_of_weights(file: str, what: str) -> str:
    figures = Figures(BENCHMARKS / file)
    about, full = figures.record["about"], figures.get("sent_bytes/fp32") or 0.0
    rows = []
    for name in (name.removeprefix("loss/") for name in figures.rows if name.startswith("loss/")):
        sent = figures.get(f"sent_bytes/{name}") or 0.0
        loss = figures.get(f"loss/{name}") or 0.0
        fewer = f"{full / sent:.1f}x" if sent else ""
        rows.append([name, f"{sent / 1e3:,.0f} kB", fewer, f"{loss:.4f}", figures.bounded(f"difference/{name}")])
    head = ["weights and gradients", "sent per step", "fewer", "held-out loss (nats/byte)", "against fp32"]
    per_node = about.get("ranks_per_node", 1)
    options = f" --ranks {about['ranks']} --ranks-per-node {per_node}" if per_node > 1 else ""
    return (
        f"`python -m experiments bench deltas{options}`: a byte-level GPT of {about['parameters'] / 1e6:.1f}M "
        f"parameters under FSDP2, {about['ranks']} ranks, {about['task']['steps']} steps, {about['seeds']} seeds; "
        f"{what}. In brackets, 90 % confidence intervals.\n\n"
        f"{table(head, rows)}\n\n{figures.machine}."
    )


def trainings(figures: Figures, command: str, workers: str) -> str:
    about, rows = figures.record["about"], []
    names = [name.removeprefix("loss/") for name in figures.rows if name.startswith("loss/")]
    reference, *others = names
    names = [reference, *sorted(others, key=lambda name: figures.rows[f"loss/{name}"]["value"])]
    tried = {float(rate) for name in names for rate in figures.rows[f"loss/{name}"]["by_rate"]}
    full = figures.get(f"sent_bytes/{names[0]}") or 1.0
    for name in names:
        row, sent = figures.rows[f"loss/{name}"], figures.get(f"sent_bytes/{name}") or 0.0
        fewer = f"{full / sent:.0f}x" if sent else ""
        rows.append(
            [
                name,
                f"{row['lr']:g}",
                f"{sent / 1e3:,.1f} kB",
                fewer,
                f"{row['value']:.4f}",
                figures.bounded(f"difference/{name}"),
            ]
        )
    head = ["", "learning rate", "sent per step", "fewer", "held-out loss (nats/byte)", f"against {names[0]}"]
    return (
        f"`python -m experiments {command}`: a byte-level GPT of width {about['task']['model']['width']}, "
        f"{about['workers']} {workers}, {about['steps']} steps, {about['seeds']} seeds, each method at the best "
        f"learning rate of those tried, {min(tried):g} to {max(tried):g}. In brackets, 90 % confidence "
        "intervals. *alone* is one worker without any communication: a method that ends above it "
        f"is worse than sending nothing.\n\n{table(head, rows)}\n\n{figures.machine}."
    )


def chaos() -> str:
    figures = Figures(BENCHMARKS / "chaos.json")
    groups = [name.removeprefix("faults/") for name in figures.rows if name.startswith("faults/")]

    def row(title: str, name: str, total: str = "") -> list[str]:
        cells = []
        for group in groups:
            value = figures.get(f"{name}/{group}") or 0
            cells.append(f"{value:g}" + (f" of {figures.get(f'{total}/{group}') or 0:g}" if total else ""))
        return [title, *cells]

    rows = [
        row("faults", "faults"),
        row("survivors that got an error", "failed", "survivors"),
        row("errors that name the rank that failed", "named", "failed"),
        row("survivors that hung", "hung"),
        row("processes that aborted", "aborted"),
        row("seconds from fault to error, at most", "latest_s"),
        row("checkpoints that could not be written afterwards", "checkpoints_failed"),
        row("steps whose parameters differ from a training without a fault", "wrong_digests"),
    ]
    about, control = figures.record["about"], figures.get("faults/stock DDP") or 0
    met = "" if control >= about["faults"] else f" Time sufficed for {control:g} of them under stock DDP."
    return (
        f"{about['faults']} faults with seed {about['seed']}, three ranks, a timeout of {about['timeout_s']:g} s, "
        f"{about['jobs']} trainings at a time.{met}\n\n{table(['', *groups], rows)}\n\n{figures.machine}, busy with "
        "other work besides."
    )


def soak() -> str:
    figures = Figures(BENCHMARKS / "soak.json")
    about = figures.record["about"]
    marks = about["marks"]
    rows = [
        [
            f"{mark['step']:,}",
            f"{mark['memory_bytes'] / 2**20:.1f}",
            f"{mark['threads']}",
            f"{mark['files']}",
            "alike" if mark["alike"] else "differ",
        ]
        for mark in (marks[0], *marks[len(marks) // 2 : -1 : max(1, len(marks) // 2)], marks[-1])
    ]
    return (
        f"`make soak`: {about['steps']:,} steps of {about['ranks']} ranks with `{about['compressor']}`; of each figure "
        f"the largest of all ranks.\n\n{table(['steps', 'MiB', 'threads', 'open files', 'replicas'], rows)}\n\n"
        f"{figures.machine}."
    )


def fuzz() -> str:
    runs = [Figures(path) for path in sorted(BENCHMARKS.glob("fuzz-*.json"))]
    inputs, decoded, seconds = (
        sum(run.get(name) or 0 for run in runs) for name in ("inputs", "decoded", "processor_time")
    )
    refused = inputs - decoded
    kinds = sum(name.startswith("inputs/") for name in runs[0].rows)
    seeds = ", ".join(str(run.record["about"]["seed"]) for run in runs)
    return (
        f"`make fuzz-sanitized`: {inputs:,.0f} damaged messages of {kinds} kinds (seeds {seeds}), decoded on the "
        f"instruction-set level {runs[0].record['about']['level']} under the address and undefined-behavior "
        f"sanitizers in {seconds / 60:.0f} minutes of processor time: no report of either. {decoded:,.0f} decoded to "
        f"something, {refused:,.0f} were refused with an error that says why: those cut short, and all sealed frames "
        f"but those whose damage lay outside of what is checked. {runs[0].machine}."
    )


def conformance() -> str:
    figures, hooks = (Figures(BENCHMARKS / f"{name}.json") for name in ("conformance", "conformance-hooks"))
    about = figures.record["about"]
    runs = [who for who in about["compressors"] if who != "gloo"]
    rows = [
        [name, *(f"{figures.get(f'{name}/{who}') or 0:.0f}" for who in ("gloo", *runs))]
        for name in ("passed", "skipped", "failed", "failed by name", "passed with compressed collectives")
    ]
    rows = [row for row in rows if set(row[1:]) != {"0"}]
    reasons: dict[str, set[str]] = {}
    for test, why in ((test, why) for who in runs for test, why in about["failed"][who].items()):
        reasons.setdefault(why, set()).add(f"`{test}`")
    failing = [f"{why}: {', '.join(sorted(tests))}" for why, tests in sorted(reasons.items())]
    on_gloo, on_ours = (hooks.get(f"passed/{who}") or 0 for who in ("gloo", runs[-1]))
    sent = figures.get(f"compressed collectives/{runs[-1]}") or 0
    return (
        f"PyTorch has {figures.get('tests') or 0:.0f} tests of process groups. With two ranks and no GPU, gloo passes "
        f"{figures.get('passed/gloo') or 0:.0f} of them and skips the others. `make conformance` runs these on groups "
        "of thinwire that are presented to the tests as gloo: with the defaults, to which their tensors are too small "
        f"to be compressed, and with `{about['compressors'][runs[-1]]}` from one element on, which is lossless and "
        f"sends every float through the compressed collectives ({sent:.0f} of them).\n\n"
        f"{table(['tests', 'gloo', *runs], rows)}\n\n"
        f"The tests that fail depend on the name of the backend:\n\n{bullets(failing)}\n"
        f"{hooks.get('tests') or 0:.0f} of the skipped tests, of communication hooks, need a GPU only because their "
        f"tensors are on one. With tensors on the CPU (`python -m experiments conformance`), {on_gloo:.0f} pass on "
        f"gloo and {on_ours:.0f} on thinwire with every float compressed.\n\n{figures.machine}."
    )


_MORE = {
    "overlapped": "local updates, 1 step late",
    "streaming": "local updates in 2 fragments, 3 steps late, mixed by half",
    "muloco-streaming": "local updates with Muon in 2 fragments, 2 steps late",
    "low-rank-bf16": "thinwire's PowerSGD, rank 4, factors in bf16",
    "in-optimizer": "**2 bits in `CompressedAdamW`**, buckets of 64",
    "one-bit-adam": "1-bit Adam, the first 15 % of the steps in fp32",
}
"""Titles of variants that the demo does not train."""


def local() -> str:
    return _same_loss("local", "the demo's GPT, 2 ranks, {steps} steps, an exchange every {every}, plain averages,")


def in_optimizer() -> str:
    return _same_loss("in-optimizer", "the demo's GPT, 2 ranks, {steps} steps,")


def low_rank() -> str:
    return _same_loss("low-rank", "the demo's GPT, 2 ranks, {steps} steps,")


def _same_loss(file: str, setting: str) -> str:
    """What each variant sends, and how soon it has fp32's loss, from a record of ``bench local``."""
    figures = Figures(BENCHMARKS / f"{file}.json")
    about, rows = figures.record["about"], []
    for rate in about["rates"]:
        free = figures.get(f"{rate}/seconds_to_same_loss/free") or 1.0
        speeds = {name: figures.get(f"{rate}/speed_over_alone/{name}") or 0.0 for name in TITLES | _MORE}
        for name in sorted(speeds, key=speeds.__getitem__):
            sent, seconds = (figures.get(f"{rate}/{kind}/{name}") for kind in ("sent_bytes", "seconds_to_same_loss"))
            if sent is None:
                continue
            rows.append(
                [
                    f"{format_rate(parse_rate(rate))}, {TITLES.get(name) or _MORE[name]}",
                    f"{sent / 1e3:,.0f} kB",
                    f"{speeds[name]:.2f}x",
                    f"{seconds:.1f} s ({seconds / free:.2f}x)" if seconds else "not by every seed",
                    "" if name == "fp32" else figures.bounded(f"val_loss_above_fp32/{name}"),
                ]
            )
    if figures.get("val_loss/muon"):
        rows.append([TITLES["muon"], "", "", "", figures.bounded("val_loss_above_fp32/muon")])
    head = [
        "",
        "sent per step",
        "speed, relative to training alone",
        "time to fp32's loss + 1 % (relative to a free network)",
        "held-out loss, against fp32's",
    ]
    return (
        f"`{figures.record['command']}`: {setting.format(steps=about['task']['steps'], every=about['every'])} "
        f"{about['seeds']} seeds; in brackets, 90 % confidence intervals. "
        "Methods take turns; speeds are medians over turns of the first seed, and the same loss "
        "is 1.01 times fp32's last. A free network would take fp32's steps at the speed of training alone.\n\n"
        f"{table(head, rows)}\n\n{figures.machine}."
    )


def peers() -> str:
    figures = Figures(BENCHMARKS / "peers.json")
    about, rows = figures.record["about"], []
    titles = {
        "torchft": "torchft's DiLoCo, fp32",
        "hivemind": "hivemind's averager, fp32",
        "thinwire, fp32": "thinwire, fp32",
        "thinwire, 2 bits": "**thinwire**",
    }
    for rate in about["rates"]:
        for method, title in titles.items():
            if figures.get(f"{rate}/seconds/{method}") is None:
                continue
            sent, seconds, ratio, loss = (
                figures.get(f"{rate}/{kind}/{method}") or 0.0
                for kind in ("sent_bytes", "seconds", "seconds_of_peer", "loss")
            )
            above = "" if method == "torchft" else figures.bounded(f"{rate}/loss_above_peer/{method}")
            rows.append(
                [
                    f"{format_rate(parse_rate(rate))}, {title}",
                    f"{sent / 1e3:.2f} kB",
                    f"{seconds:.1f} s",
                    f"{ratio:.2f}x",
                    f"{loss:.4f}",
                    above,
                    f"{figures.get(f'{rate}/replicas_differ/{method}'):.0f}",
                ]
            )
    task = about["task"]
    loss, differ = "held-out loss (nats/byte)", "runs that end with different weights"
    head = ["", "on the interface per step", "time", "of torchft's", loss, "against torchft's", differ]
    return (
        f"`python -m experiments bench peers`: a byte-level GPT of width {task['model']['width']}, 2 workers, "
        f"{task['steps']} steps of AdamW, an exchange every {about['every']}, the same outer optimizer, "
        f"{about['seeds']} seeds. Times are medians of the steps after the first exchange, ratios medians over seeds; "
        "in brackets, 90 % confidence intervals.\n\n"
        f"{table(head, rows)}\n\n{figures.machine}."
    )


MEMBERS = {
    "undisturbed": "local updates, undisturbed",
    "members": "local updates, workers die and come back",
    "every-step": "an exchange in every step, workers die and come back",
    "restarting": "4-bit gradients in every step, torchrun restarts all from a checkpoint",
}
TIMES = {
    "kept_steps": "steps that are kept",
    "starting": "start of processes",
    "joining": "wait for the first exchange",
    "waiting_for_a_core": "wait for a core",
    "exchanging": "exchanges",
    "lost": "steps that are lost, the rest",
}


def members() -> str:
    figures = Figures(BENCHMARKS / "members.json")
    about, rows, times = figures.record["about"], [], []
    for mode, title in MEMBERS.items():
        if figures.get(f"{mode}/0/kept_tokens") is None:
            continue
        of_started = figures.get(f"{mode}/0/goodput/of_started_workers")
        present, of_all, kept, loss, compared, differing, kills = (
            figures.get(f"{mode}/0/{name}") or 0.0
            for name in (
                "goodput/of_present_workers",
                "goodput/of_all_workers",
                "kept_of_undisturbed",
                "loss",
                "exchanges_compared",
                "exchanges_differing",
                "kills",
            )
        )
        started = "–" if of_started is None else f"{of_started:.0%}"
        row = [title, f"{kills:.0f}", started, f"{present:.0%}", f"{of_all:.0%}", f"{kept:.0%}", f"{loss:.3f}"]
        rows.append([*row, f"{differing:.0f} of {compared:.0f}"])
        if figures.get(f"{mode}/0/time/kept_steps") is not None:
            times.append([title, *(f"{figures.get(f'{mode}/0/time/{name}') or 0.0:.1%}" for name in TIMES)])
    excess = figures.rows.get("members/0/loss_excess")
    at_equal = ""
    if excess:
        at_equal = (
            f"After {excess['tokens'] / 1e3:,.0f} thousand tokens, the most that both have kept, the disturbed loss is "
            f"{100 * excess['value']:+.2f} % from the undisturbed one. "
        )
    goodputs = ["goodput of started workers", "of present workers", "of four workers"]
    of_undisturbed, differ = "kept, of the undisturbed run's", "exchanges after which weights differ"
    head = ["", "deaths", *goodputs, of_undisturbed, "last loss", differ]
    return (
        f"`python -m experiments bench members`: {about['workers']} workers at 100 Mbit/s for {about['seconds']} s, "
        f"one of which is killed every {about['kill_every_s']} s and started again {about['absent_s']} s later. A step "
        f"takes {about['step_s']} s, most of it asleep; an exchange is due every {about['every']} steps, and so is a "
        "checkpoint. Goodput is the tokens that are in shared weights or in a checkpoint at the end over those that "
        "could have been trained on without a pause: by workers from the time when they were ready to join, by those "
        "that were there, from the start of their processes to their end, or by four workers all the time.\n\n"
        f"{table(head, rows)}\n\nWhat workers did while they were there:\n\n{table(['', *TIMES.values()], times)}\n\n"
        f"{at_equal}{figures.machine}."
    )


def results() -> str:
    return results_page.page(results_page.read(BENCHMARKS)).rstrip("\n")


def streams() -> str:
    """All-reduces over one and over several connections, by link and pause."""
    figures = Figures(BENCHMARKS / "streams.json")
    about, rows = figures.record["about"], []
    one, *others = about["numbers"]
    for cell in (name.removesuffix(f"/{one}") for name in figures.rows if name.endswith(f"/{one}")):
        rate, rtt, *losses, pause = cell.split("/")
        link = f"{format_rate(parse_rate(rate))}, +{rtt.replace('ms', ' ms')}" + "".join(f", {x} lost" for x in losses)
        several = [figures.rows[f"{cell}/{number}"] for number in others]
        gains = [f"{1e3 * row['value']:,.0f} ms ({row['gain']:.2f}x)" for row in several]
        rows.append([link, pause, f"{1e3 * figures.rows[f'{cell}/{one}']['value']:,.0f} ms", *gains])
    head = ["2 ranks", "idle before", "1 connection", *(f"{number} connections" for number in others)]
    return (
        f"`python -m experiments bench streams`: all-reduces of {about['size_mb']:g} MB in 4 bits, medians of "
        f"{about['repeats']}.\n\n{table(head, rows)}\n\n{figures.machine}."
    )


def instrument() -> str:
    """Ratios of step times, by kind, model and method."""
    figures = Figures(BENCHMARKS / "instrument.json")
    about, rows = figures.record["about"], []
    for name, row in figures.rows.items():
        if name.startswith("computed_s/"):
            continue
        kind, model, rate, title = name.split("/")
        interval = f"{row['lower']:.3f} to {row['upper']:.3f}"
        rows.append([kind, model.upper(), format_rate(parse_rate(rate)), title, f"{row['value']:.3f}", interval])
    head = ["", "model", "link", "method", "ratio", "interval"]
    return (
        f"`python -m experiments bench instrument`, {about['runs']} runs of {about['rounds']} rounds:\n\n"
        f"{table(head, rows)}\n\n{figures.machine}."
    )


def power() -> str:
    tasks = power_tables.powers(BENCHMARKS)
    return table(list(power_tables.HEAD), [power_tables.cells(one) for one in tasks])


def policies() -> str:
    """Every policy on the recorded gradients, a table for each task and family."""
    figures = Figures(BENCHMARKS / "policies.json")
    recording = figures.record["about"]["recording"]
    parts: dict[str, list[list[str]]] = {}
    for name, row in figures.rows.items():
        task, _, method = name.split("/")
        if method == "uniform":
            continue
        cells = [_ratio(row[key]) for key in ("fewer_bytes", "fewer_bytes_later", "less_error", "fewer_bytes_whole")]
        title = f"{recording['titles'][task]}, {row['family']}"
        parts.setdefault(title, []).append([row["title"], *cells, f"{1e3 * row['decision_s']:,.1f} ms"])
    head = ["policy", "fewer bytes at the same error", "the same on the next snapshot", "less error at the same bytes"]
    head += ["fewer bytes at the same error of the whole gradient", "a decision"]
    tables = "\n\n".join(f"{title}:\n\n{table(head, rows)}" for title, rows in parts.items())
    seeds = recording["trainings"] // len(recording["titles"])
    snapshots = " and ".join(str(count) for count in sorted(set(recording["snapshots"].values())))
    about = (
        f"{seeds} trainings of each task, {snapshots} snapshots of each, sums over {recording['window']} steps, "
        f"{recording['bytes'] / 1e6:.0f} MB. In brackets, 90 % confidence intervals of the mean over trainings."
    )
    caption = (
        "Error of the gradient against bytes of a step, by policy, for two networks and three kinds of compression"
    )
    return f"{about}\n\n![{caption}](benchmarks/policies.svg)\n\n{tables}\n\n{figures.machine}."


def _ratio(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['mean']:.2f}x ({ratio['lower']:.2f} to {ratio['upper']:.2f})"


PAGES = {
    "README.md": {"headline": headline, "demo": demo, "longer": longer},
    "docs/paper-fft.md": {"fft-blocks": fft_blocks},
    "docs/compressors.md": {"compressors": compressors, "low-rank": low_rank},
    "docs/speed.md": {"allreduce": allreduce, "allreduce-long": allreduce_long, "step": step, "streams": streams},
    "docs/process-group.md": {"conformance": conformance},
    "docs/pipelines.md": {"stores": stores, "pipelines": pipelines},
    "docs/failures.md": {"chaos": chaos, "soak": soak, "fuzz": fuzz},
    "docs/fsdp.md": {"sharded": sharded, "deltas": deltas, "deltas-nodes": deltas_nodes},
    "docs/integers.md": {"integers": integers},
    "docs/compressed-adamw.md": {
        "optimizer": optimizer,
        "in-optimizer": in_optimizer,
        "training": training,
        "training-8": partial(training, "training-8.json"),
    },
    "docs/index.md": {"first-answer": first_answer},
    "docs/local.md": {"local": local, "peers": peers},
    "docs/members.md": {"members": members},
    "docs/doctor.md": {"doctor": doctor, "doctor-fsdp": doctor_fsdp},
    "docs/kernels.md": {"kernels": kernels},
    "docs/algorithms.md": {"algorithms": algorithms},
    "docs/policy-laboratory.md": {"policies": policies},
    "docs/results.md": {"results": results, "instrument": instrument, "power": power},
    **{f"docs/repro-{entry.name}.md": {f"repro-{entry.name}": partial(experiment, entry.name)} for entry in CATALOG},
}
"""Pages, and what stands between which marks in them."""


def fill(page: str, text: str) -> str:
    """The text of a page with every marked section written anew."""
    for name, section in PAGES[page].items():
        pattern = re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        match = pattern.search(text)
        if not match:
            raise SystemExit(f"{page} has no section 'figures: {name}'")
        text = f"{text[: match.end(1)]}{_relative(section(), page)}\n{text[match.start(2) :]}"
    return text


def _relative(text: str, page: str) -> str:
    """``text`` with its links, which sections write from the root of the repository, as ``page`` needs them."""
    return text.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/") if "/" in page else text


def main() -> int:
    for page in PAGES:
        text = (ROOT / page).read_text()
        filled = fill(page, text)
        if "--check" not in sys.argv[1:]:
            (ROOT / page).write_text(filled)
        elif filled != text:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
