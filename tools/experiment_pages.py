"""The sections of docs/repro-*.md: claims, tables, what differs and pictures, from the experiments' JSON files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from captions import CAPTIONS
from figures import BENCHMARKS, Figures, bullets, claims, machines, picture, pictures, table

from experiments.framework.claims import estimated
from experiments.framework.verdicts import shown_difference
from thinwire_tools.lab.units import format_rate, parse_rate

Row = dict[str, Any]


class Measured:
    """The rows of a paper's whole run; a later run of single parts takes the place of its rows of the same names."""

    def __init__(self, name: str, benchmarks: Path) -> None:
        whole = Figures(benchmarks / f"repro-{name}.json")
        self.about = whole.record["about"]
        self._runs: dict[str, Figures] = {}
        rows: dict[str, Row] = {}
        for run in (whole, *(Figures(later) for later in sorted(benchmarks.glob(f"repro-{name}-*.json")))):
            rows |= run.rows
            self._runs |= dict.fromkeys(run.rows, run)
        self.rows = list(rows.values())

    def machine(self, rows: Iterable[Row] | None = None) -> str:
        """Where ``rows``, or all, were measured."""
        names = self._runs if rows is None else [row["name"] for row in rows]
        return machines(list(dict.fromkeys(self._runs[name] for name in names)))

    def command(self, row: Row) -> str:
        """What measured a row."""
        return self._runs[row["name"]].record["command"]

    def row(self, name: str) -> Row | None:
        return next(self.under(name, exactly=True), None)

    def value(self, name: str) -> float | None:
        row = self.row(name)
        return None if row is None else row["value"]

    def under(self, prefix: str, *, exactly: bool = False) -> Iterator[Row]:
        """The rows whose names begin so."""
        return (row for row in self.rows if (row["name"] == prefix if exactly else row["name"].startswith(prefix)))


def experiment(name: str, benchmarks: Path = BENCHMARKS) -> str:
    """The whole section of docs/repro-``name``.md."""
    if not (benchmarks / f"repro-{name}.json").exists():
        return f"Not measured yet: `python -m experiments {name}`."
    measured = Measured(name, benchmarks)
    paper = import_module(f"experiments.papers.{name}.paper").PAPER
    parts = [
        f"{_verdicts(measured.rows)} Measured on {measured.machine()}.",
        "## Claim by claim",
        f"[How a claim is judged](docs/results.md#how-a-claim-is-judged). {paper.judged}",
        *NOTES.get(name, ()),
        claims(measured.rows, f"the {paper.source}", PARTS.get(name, {})),
        "## Tables and figures",
    ]
    captions = CAPTIONS[name]
    left = {path.stem: path for path in pictures(benchmarks / f"repro-{name}")}
    for text in (text for make in TABLES.get(name, ()) for text in make(measured)):
        parts.append(text)
        # A picture follows the table that its caption begins with.
        shown = [stem for stem in left if text.startswith(captions[stem].under or "\n")]
        parts += [picture(left.pop(stem), captions[stem].text) for stem in shown]
    parts += [picture(path, captions[stem].text) for stem, path in left.items()]
    parts += [f"## Differences from the {paper.source}'s setup", bullets(paper.differs).rstrip()]
    return "\n\n".join(parts)


def _verdicts(rows: list[Row]) -> str:
    counts = Counter(row["holds"] for row in rows if row.get("claim"))
    return (
        f"**Of {counts.total()} claims, {counts[True]} hold here and {counts[False]} do not; for {counts[None]} the "
        "measurement is inconclusive.**"
    )


PARTS = {
    "aqsgd": {"links": "bits by link"},
    "cgx": {number: f"table {number}" for number in ("3.4", "3.5", "3.6", "3.7", "3.9")} | {"blob": "QNCCL"},
    "intsgd": {"2": "table 2", "3": "table 3"},
}
"""Of a paper's rows: in place of which recorded figure stands what."""

NOTES = {
    "aqsgd": (
        "By the authors' recipe AQ-SGD sends the first epoch whole, and gradients are rounded to the nearest level, as "
        "in the authors' code; DirectQ, which knows no samples, has no such epoch here. Messages that are kept in few "
        "bits (figures 9 (e, f), 4 stages, fw2 bw4) are trained by it, too.",
    ),
    "cgx": (
        "A ratio of throughputs is that of the method which should be faster over the other. *Flat buffers*: DDP's "
        "buckets are compressed without regard to layers, as in QNCCL (section 3.7.2). In the tables, ratios are "
        "medians over separate runs, not quotients of the median speeds.",
    ),
    "intsgd": ("A ratio says how many times as fast, or as slow, a method is as the claim has it.",),
    "qsdp": ("Bytes of L-GreCo are those of training steps, including the steps before its first plan.",),
}
"""What a reader of a paper's claims has to know of their figures."""


def _titled(title: str, head: list[str], rows: list[list[str]], *, numbers: bool = True) -> Iterator[str]:
    """A table under its title; nothing where it has no rows."""
    if rows:
        yield f"{title}:\n\n{table(head, rows, numbers=numbers)}"


def _mean(losses: list[float | None]) -> str:
    """None stands for what diverged."""
    known = [loss for loss in losses if loss is not None]
    return f"{fmean(known):.3f}" if len(known) == len(losses) else "diverges"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def _with_links(rates: list[str], row: Row) -> list[str]:
    """The paper's rates, each with that of the link here."""
    return [f"{_rate(rate)} ({_rate(row['links'][rate])})" for rate in rates]


def _rate(text: str | None) -> str:
    return format_rate(parse_rate(text)) if text else "loopback"


# --- cgx

THROUGHPUT = {
    "3.4": "Table 3.4, reduction schemes",
    "3.6": "Table 3.6, systems",
    "3.9": "Table 3.9, two nodes",
    "3.3": "Figure 3.3, transports on one host",
    "blob": "Section 3.7.2, QNCCL, compression without layers",
}


def _cgx_throughput(measured: Measured) -> Iterator[str]:
    """Items per second by method and model, also in multiples of the reference's, here and in the thesis."""
    for figure, title in THROUGHPUT.items():
        by_method: dict[str, dict[str, Row]] = {}
        for row in measured.under(f"{figure}/items_per_s/"):
            by_method.setdefault(row["method"], {})[row["model"]] = row
        models = {model: row for rows in by_method.values() for model, row in rows.items()}
        head = [""]
        for model, row in models.items():
            head += [f"{model}, {row['unit']}", f"over {row['reference']}", f"{row['model_of_thesis']} in the thesis"]
        body = []
        for method, rows in by_method.items():
            cells = ["flat buffers" if method == "blob" else method]
            for row in (rows[model] for model in models):
                theirs = row["thesis_relative"]
                cells += [f"{row['value']:,.0f}", f"{row['relative']:.2f}x", "" if theirs is None else f"{theirs:.2f}x"]
            body.append(cells)
        if body:
            yield f"{title}:\n\n{table(head, body)}"


def _cgx_links(measured: Measured) -> Iterator[str]:
    links = bullets([link["proportion"] for link in measured.about["links"].values()])
    yield f"The links, and the speed of fp32 on them:\n\n{links}".rstrip()


# --- intsgd

INTSGD = {
    "sgd all-gather": "SGD (all-gather)",
    "qsgd": "QSGD",
    "natsgd": "NatSGD",
    "sgd": "SGD (all-reduce)",
    "powersgd": "PowerSGD (EF)",
    "intsgd determ": "IntSGD (determ.)",
    "intsgd": "IntSGD (random)",
    "intsgd 32": "IntSGD (random), int32",
    "heuristic": "Heuristic IntSGD, int8",
    "heuristic 32": "Heuristic IntSGD, int32",
}
"""Rows of tables 2 and 3 of the IntSGD paper, and those of its figure 1."""


def _intsgd(measured: Measured) -> Iterator[str]:
    """Quality and times of every method: table 2 (images) and 3 (words)."""
    about = measured.about
    for number, network, quality in (("2", "small ResNet", "held-out accuracy"), ("3", "LSTM", "held-out loss")):
        rows = []
        for name, title in INTSGD.items():
            times, value = measured.row(f"{number}/step_s/{name}"), measured.value(f"{number}/quality/{name}")
            if times is not None:
                shown = "" if value is None else f"{value:.2%}" if number == "2" else f"{value:.3f}"
                seconds = (times[key] for key in ("overhead_s", "communication_s", "value"))
                rows.append([title, shown, *(f"{1e3 * taken:.1f}" for taken in seconds)])
        where = f"a step on {about['num_ranks']} ranks, links of {_rate(about['rate'])}"
        head = ["", quality, "overhead, ms", "communication, ms", "step, ms"]
        yield from _titled(f"Table {number}, the {network}; {where}", head, rows)
    words = about["words"]
    yield (
        f"Pictures of the LSTM evaluate {words['probe_windows']:,} of the {words['held_out_windows']:,} held-out "
        "windows, table 3 all of them."
    )


# --- lgreco

POLICIES = {
    "table 3.8": "Table 3.8, policies over 4 bits, the GPT, one seed",
    "table 4.5": "Table 4.5, policies over PowerSGD, the GPT, one seed",
    "table 4.4": "Table 4.4, policies over top-k, the ResNet, relative to a density of 2 %",
    "future work": "Several families in one plan, within the error of uniform top-k, the GPT, one seed",
}


_BEFORE = "thinwire repro"
"""How commands of records begin that are older than the policies' present state."""


def _lgreco_quality(measured: Measured) -> Iterator[str]:
    """Tables 4.2 and 4.3 in one: ratios to fp32, the gain, quality lost, overhead."""
    rows = []
    for name, network, part, unit in (
        ("gpt", "GPT of words", "table 4.3", "%"),
        ("cnn", "small ResNet", "table 4.2", "points"),
    ):
        for family, title in (("bits", "4 bits"), ("topk", "top-k"), ("powersgd", "PowerSGD")):
            gain = measured.row(f"{part}/gain/{name}/{family}")
            if gain is None:
                continue
            lost = [measured.value(f"{part}/lost/{name}/{family}/{kind}") for kind in ("uniform", "l-greco")]
            overhead = measured.value(f"table 4.1/overhead/{name}/{family}")
            rows.append(
                [
                    f"{network}, {title}",
                    *(f"{gain['ratio'][kind]:.1f}x" for kind in ("uniform", "lgreco")),
                    f"{gain['value']:.2f}x",
                    *("" if value is None else f"{100 * value:+.2f} {unit}" for value in lost),
                    "" if overhead is None else f"{overhead:.2%}",
                ]
            )
    title = (
        "Tables 4.1 to 4.3: times fewer bytes than fp32 as measured, quality lost to fp32 (loss of the GPT, accuracy "
        "of the ResNet), and what deciding takes of training"
    )
    head = ["bytes against fp32's", "uniform", "L-GreCo", "gain", "uniform loses", "L-GreCo loses", "overhead"]
    yield from _titled(title, head, rows)


def _lgreco_policies(measured: Measured) -> Iterator[str]:
    for part, title in POLICIES.items():
        rows = []
        for row in measured.under(f"{part}/ratio/"):
            if measured.command(row).startswith(_BEFORE) and not rows:
                title += ", [before policies were mended](docs/defects.md) and not measured anew yet"
            theirs, unit = row["thesis"], "points" if "/cnn/" in row["name"] else "%"
            lost = "diverged" if row["lost"] is None else f"{100 * row['lost']:+.2f} {unit}"
            rows.append([row["title"], f"{row['value']:.2f}x", "" if theirs is None else f"{theirs:.2f}x", lost])
        yield from _titled(title, ["", "bytes, times fewer than uniform", "in the thesis", "lost to fp32"], rows)


def _lgreco_equal(measured: Measured) -> Iterator[str]:
    """Quality at equal bytes, with the rows that say what the task can show."""
    rows = []
    for row in measured.under("equal bytes/lost/"):
        name, _, kind = row["name"].removeprefix("equal bytes/lost/").partition("/")
        title = EQUAL_KINDS[kind or name].format(spec=row["spec"].partition(" with ")[0])
        rows.append([title, f"{row['sent'] / 1e3:,.1f}", shown_difference(estimated(row, "lost"))])
    title = "The GPT at equal bytes, held-out loss beyond fp32's (in brackets, one-sided 95 % bounds)"
    yield from _titled(title, ["", "kB a step, rank 0", "beyond fp32"], rows)


EQUAL_KINDS = {
    "control": "control: `{spec}`",
    "alone": "alone: nothing sent",
    "uniform": "`{spec}`",
    "lgreco": "`{spec}`, L-GreCo at these bytes",
    "half": "`{spec}`, about half of these bytes",
}
"""Rows of the table at equal bytes."""


def _lgreco_throughput(measured: Measured) -> Iterator[str]:
    """Figures 4.3 and 4.4 as tables: items per second by ranks, one table a link."""
    for row in measured.rows:
        if "/scaling/" not in row["name"]:
            continue
        worlds = list(row["nothing_sent"])
        sent = row["payload_bytes"][worlds[-1]]
        body = [
            [
                row["titles"][name],
                *(f"{values[n]:,.0f}" for n in worlds),
                "" if sent.get(name) is None else f"{sent[name] / 1e3:,.0f}",
            ]
            for name, values in row["items_per_s"].items()
            if isinstance(values, dict)
        ]
        body.append(["nothing sent", *(f"{row['nothing_sent'][n]:,.0f}" for n in worlds), "0"])
        head = ["tokens/s", *(f"{n} ranks" for n in worlds), f"kB a step, {worlds[-1]} ranks"]
        link = f"tokens/s over {_rate(row['name'].rpartition('/')[2])}"
        yield from _titled(f"{row['figure'].capitalize()}, {link}", head, body)


# --- qsdp


def _qsdp_recovery(measured: Measured) -> Iterator[str]:
    rows = []
    for row in measured.under("table 5.1/lost/"):
        theirs = row["thesis"]
        rows.append(
            [
                f"{row['title']}, {row['num_ranks']} ranks",
                f"{fmean(row['baseline_perplexities']):.3f}",
                f"{fmean(row['perplexities']):.3f}",
                f"{100 * row['value']:+.2f} %",
                f"{theirs['baseline']} and {theirs['qsdp']}, {theirs['model']}",
            ]
        )
    head = ["perplexity", "weights fp32, gradients fp16", "W8G8", "lost", "in the thesis"]
    yield from _titled("Table 5.1, perplexity of W8G8 and of the baseline", head, rows)


def _cells(measured: Measured, prefix: str) -> dict[tuple[int, int], Row]:
    """Rows by bits, or parts, of weights and of gradients."""
    return {(row["weights"], row["gradients"]): row for row in measured.under(prefix)}


def _qsdp_grid(measured: Measured) -> Iterator[str]:
    cells = _cells(measured, "table 5.2/perplexity/")
    weights, gradients = (sorted({key[i] for key in cells}, reverse=True) for i in range(2))
    rows = [
        [
            f"weights of {w} bits",
            *(f"{cells[w, g]['value']:.3f} ({100 * cells[w, g]['lost']:+.1f} %)" for g in gradients),
            " / ".join(f"{cells[w, g]['thesis']:.2f}" for g in gradients),
        ]
        for w in weights
    ]
    for row in list(cells.values())[:1]:
        title = f"Table 5.2, uniform quantization, the baseline {row['baseline']:.3f} (in the thesis 35.81)"
        yield from _titled(title, ["", *(f"gradients of {g} bits" for g in gradients), "in the thesis"], rows)


def _qsdp_rounding(measured: Measured) -> Iterator[str]:
    rows = [
        [
            row["name"].removeprefix("rounding/"),
            f"{row['mean']:.3f}",
            f"{row['against']:.3f}",
            f"{100 * row['value']:+.2f} % ({100 * row['lower']:+.2f} to {100 * row['upper']:+.2f})",
        ]
        for row in measured.under("rounding/")
    ]
    head = ["perplexity", "weights rounded to nearest", "stochastically", "nearest against stochastic"]
    yield from _titled("Rounding of weights, gradients of 6 bits", head, rows)


def _qsdp_lgreco(measured: Measured) -> Iterator[str]:
    rows = [
        [
            row["title"],
            f"{row['mean']:.3f}",
            f"{100 * row['value']:+.2f} % ({100 * row['lower']:+.2f} to {100 * row['upper']:+.2f})",
            f"{fmean(row['step_bytes']) / 1e3:.1f}",
            f"{fmean(row['last_step_bytes']) / 1e3:.1f}",
        ]
        for row in measured.under("L-GreCo/lost/")
        if "title" in row
    ]
    head = ["", "perplexity", "against FP32's", "kB sent by a rank, mean step", "last step"]
    yield from _titled("L-GreCo over QSDP", head, rows)


def _qsdp_learned(measured: Measured) -> Iterator[str]:
    nearest = {row["pair"]: row["perplexities"] for row in measured.under("table 5.3/learned_beside_nearest/")}
    rows = []
    for row in (row for figure in ("table 5.3", "table C.3") for row in measured.under(f"{figure}/learned/")):
        theirs = row["thesis"]
        rows.append(
            [
                row["pair"],
                f"{fmean(row['uniform_perplexities']):.3f}",
                f"{fmean(nearest[row['pair']]):.3f}" if row["pair"] in nearest else "",
                f"{fmean(row['perplexities']):.3f}",
                f"{100 * row['value']:+.2f} %",
                f"{theirs['uniform']} and {theirs['learned']}",
            ]
        )
    head = ["perplexity", "uniform", "uniform, nearest", "learned", "learned against uniform", "in the thesis"]
    yield from _titled("Tables 5.3 and C.3, uniform and learned levels", head, rows)


def _qsdp_step_times(measured: Measured) -> Iterator[str]:
    row = measured.row("figure 5.3/step_s")
    if row is None:
        return
    rates, sent = list(next(iter(row["step_s"].values()))), row["payload_bytes"]
    rows = [
        [
            row["titles"][method],
            *(_ms(seconds[rate]) for rate in rates),
            f"{sent[method] / 1e6:.1f}" if method in sent else "",
        ]
        for method, seconds in row["step_s"].items()
    ]
    head = [f"ms a step, {row['num_ranks']} ranks", *map(_rate, rates), "MB sent by a rank"]
    yield from _titled("Figure 5.3, step times over links of several rates", head, rows)


def _qsdp_ratios(measured: Measured) -> Iterator[str]:
    def cell(row: Row) -> str:
        return f"{_ms(row['value'])} ms ({row['relative']:.2f}, {row['thesis_relative']:.2f})"

    cells = _cells(measured, "table C.2/step_s/")
    weights, gradients = (sorted({key[i] for key in cells}) for i in range(2))
    rows = [[f"weights / {w}", *(cell(cells[w, g]) for g in gradients)] for w in weights]
    title = "Table C.2, steps of which only a part is sent, and as shares of whole ones here and in the thesis"
    yield from _titled(title, ["", *(f"gradients / {g}" for g in gradients)], rows)


def sharded(benchmarks: Path = BENCHMARKS) -> str:
    """The section of README.md: steps of FSDP2 over slow links, and perplexity."""
    if not (benchmarks / "repro-qsdp.json").exists():
        return "Not measured yet: `python -m experiments qsdp`."
    measured = Measured("qsdp", benchmarks)
    steps = measured.row("figure 5.3/step_s")
    seconds = steps["step_s"] if steps else {"fp32": {}}
    rows = []
    for rate, stock in seconds["fp32"].items():
        methods = [seconds[method][rate] for method in ("fp16", "raw", "W8G8", "nothing")]
        shown = rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
        times = [f"{_ms(taken)} ms" for taken in (stock, *methods)]
        rows.append([shown, *times, f"{stock / seconds['W8G8'][rate]:.1f}x"])
    head = ["2 ranks", "FSDP2 fp32", "gradients fp16", "thinwire, raw", "**W8G8**", "nothing sent", "against fp32"]
    quality = list(measured.under("table 5.1/lost/"))
    machine = measured.machine([*([] if steps is None else [steps]), *quality])
    seeds = min((len(row["perplexities"]) for row in quality), default=0)
    lost = ", ".join(f"{100 * row['value']:+.2f} % ({row['title']}, {row['num_ranks']} ranks)" for row in quality)
    return (
        "`python -m experiments qsdp`: steps of FSDP2 on a small GPT, five gathers of all weights and one reduction "
        f"of all gradients each, over emulated links.\n\n{table(head, rows)}\n\n"
        f"Perplexity lost by W8G8, {seeds} seeds: {lost}. [All of it](docs/repro-qsdp.md).\n\n{machine}."
    )


# --- aqsgd


def _aqsgd_losses(measured: Measured) -> Iterator[str]:
    by_key: dict[str, dict[str, Row]] = {}
    for row in measured.rows:
        kind, _, key = row["name"].partition("/")[2].partition("/")
        if kind in ("aqsgd", "direct") and "setting" in row:
            by_key.setdefault(key, {})[kind] = row
    rows = []
    for pair in by_key.values():
        if len(pair) == 2:
            ours, direct = pair["aqsgd"], pair["direct"]
            losses = [_mean(run["losses"]) for run in (ours["baseline"], direct, ours)]
            setting = "{}, fw{} bw{}".format(ours["setting"], *ours["bits"])
            rows.append([setting, *losses, f"{ours['dense_bytes'] / ours['sent_bytes']:.1f}x"])
    head = ["loss of the last epoch", "FP32", "DirectQ", "AQ-SGD", "fewer bytes in all, first epoch included"]
    yield from _titled("Figures 3 and 7 to 9, loss by method", head, rows)


def _aqsgd_throughput(measured: Measured) -> Iterator[str]:
    row = measured.row("table 2/throughput")
    if row is None:
        return
    rates, rows = list(row["links"]), []
    for method, per_s in row["per_s"].items():
        theirs = row["paper"].get(method) or {}
        cells = [f"{per_s[rate]:.1f}" if rate in per_s else "" for rate in rates]
        rows.append([row["titles"][method], *cells, " / ".join(f"{theirs[r]:.1f}" for r in rates if r in theirs)])
    head = ["sequences/s", *_with_links(rates, row), "in the paper"]
    yield from _titled("Table 2, by the paper's rates (and the links' here)", head, rows)


def _aqsgd_breakdown(measured: Measured) -> Iterator[str]:
    rows = []
    for row in measured.under("table 3/wire/"):
        ours = [row[name] for name in ("forward_compute_s", "forward_s", "backward_compute_s", "backward_s")]
        theirs = [45, 1e3 * row["paper"]["forward_s"], 135, 1e3 * row["paper"]["backward_s"]]
        cells = [f"{1e3 * here:.0f} ({there:.0f})" for here, there in zip(ours, theirs, strict=True)]
        rows.append([f"{_rate(row['rate'])} ({_rate(row['link'])})", *cells])
    head = ["ms a micro-batch, here (in the paper)", "forward", "its message", "backward", "its message"]
    yield from _titled("Table 3, AQ-SGD fw4 bw8", head, rows)


def _aqsgd_links(measured: Measured) -> Iterator[str]:
    rows = [
        [
            str(at),
            *(
                f"{8e-6 * link[direction]['rate']:.1f} Mbit/s, `{link[direction]['compressor']}`"
                for direction in ("forward", "backward")
            ),
        ]
        for row in measured.under("links/chosen")
        for at, link in enumerate(row["links"])
    ]
    title = "Bits by link, chosen by `adapt=thinwire.policies.ByLink(...)`"
    yield from _titled(title, ["boundary", "forward", "backward"], rows, numbers=False)


def _aqsgd_completions(measured: Measured) -> Iterator[str]:
    def code(text: str) -> str:
        shown = text.replace("\n", "⏎").replace(" ", "␣").replace("|", "¦").replace("`", "'")
        return f"`{''.join(letter if letter.isprintable() else '.' for letter in shown)}`"

    for row in measured.under("appendix I/completions"):
        rows = [
            [code(prompt), code(row["gold"][at]), *(code(ends[at]) for ends in row["completions"].values())]
            for at, prompt in enumerate(row["prompts"][:3])
        ]
        title = "Appendix I, greedy completions (a space is shown as ␣, a line's end as ⏎)"
        yield from _titled(title, ["prompt", "the text itself", *row["completions"]], rows, numbers=False)


# --- fullstack


def _stack_losses(measured: Measured) -> Iterator[str]:
    rows = [
        [
            row["title"],
            _mean(row["baseline"]["losses"]),
            _mean(row["losses"]),
            f"{row['dense_bytes'] / row['sent_bytes']:.1f}x",
        ]
        for row in measured.under("figure 5/loss/")
        if "title" in row
    ]
    head = ["loss of the last epoch", "FP32", "compressed", "fewer bytes in all, exact steps included"]
    yield from _titled("Figure 5 (a, b), loss by method", head, rows)


def _stack_throughput(measured: Measured) -> Iterator[str]:
    row = measured.row("figure 5/throughput")
    if row is None:
        return
    rates = list(row["links"])
    rows = [
        [row["titles"][name], *(f"{per_s[rate]:.1f}" for rate in rates), f"{row['step_bytes'][name] / 1e6:.2f} MB"]
        for name, per_s in row["per_s"].items()
    ]
    head = ["sequences/s", *_with_links(rates, row), "sent by rank 0 a step"]
    yield from _titled("Figure 5 (c), by the paper's rates (and the links' here)", head, rows)


def _stack_optimizers(measured: Measured) -> Iterator[str]:
    row = measured.row("adam/seconds")
    if row is None:
        return
    rows = []
    for method in row["methods"].values():
        seconds = "never" if method["seconds"] is None else f"{method['seconds']:.1f}"
        steps = "" if method["steps"] is None else f"{method['steps']:.0f}"
        rows.append([method["title"], f"{1e3 * method['step_s']:.0f}", f"{method['loss']:.3f}", steps, seconds])
    where = f"over {_rate(row['link'])}"
    head = [where, "ms a step", "held-out loss at the end", "steps to the same loss", "seconds to it"]
    yield from _titled("QuantizedAdam and other optimizers, means over seeds", head, rows)


def _stack_others(measured: Measured) -> Iterator[str]:
    """Tables that parts made themselves: a title, a head and rows of text."""
    for made in (row["table"] for row in measured.rows if "table" in row):
        yield from _titled(made["title"], made["head"], made["rows"])


TABLES: dict[str, tuple[Callable[[Measured], Iterator[str]], ...]] = {
    "cgx": (_cgx_throughput, _cgx_links),
    "intsgd": (_intsgd,),
    "lgreco": (_lgreco_quality, _lgreco_policies, _lgreco_equal, _lgreco_throughput),
    "qsdp": (_qsdp_recovery, _qsdp_grid, _qsdp_rounding, _qsdp_lgreco, _qsdp_learned, _qsdp_step_times, _qsdp_ratios),
    "aqsgd": (_aqsgd_losses, _aqsgd_throughput, _aqsgd_breakdown, _aqsgd_links, _aqsgd_completions),
    "fullstack": (_stack_losses, _stack_throughput, _stack_optimizers, _stack_others),
}
"""The tables of each paper's page, beside that of its claims."""
