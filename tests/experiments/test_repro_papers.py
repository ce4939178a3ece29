"""Small versions of the papers' experiments, from end to end: every part, every claim, every picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.__main__ import main as experiments_main
from experiments.framework.pages import BENCHMARKS
from experiments.framework.paper import Paper
from experiments.papers.aqsgd import throughput
from experiments.papers.aqsgd.methods import ACTIVATIONS, AQSGD, ONLY_GRADIENTS
from experiments.papers.aqsgd.paper import PAPER as PIPELINES
from experiments.papers.aqsgd.stack_paper import PAPER as FULLSTACK
from experiments.papers.aqsgd.study import SMOKE
from experiments.papers.cgx.paper import PAPER as CGX
from experiments.papers.fft import measurements as fft_measurements
from experiments.papers.fft.paper import PAPER as FFT
from experiments.papers.intsgd.paper import PAPER as INTSGD
from experiments.papers.lgreco.paper import PAPER as LGRECO
from experiments.papers.qsdp.methods import SIZES_SMOKE
from experiments.papers.qsdp.paper import PAPER as QSDP
from small_versions import Small, small_version
from thinwire_tools import lab


def aqsgd(small: Small) -> None:
    sent, task = small.rows["table 2/throughput"]["step_bytes"], SMOKE.timed
    # The first stage sends activations; each message has a header.
    assert sent["fp32"] == task.num_micro * (64 + 4 * task.message_values)
    for bits in ((3, 6), (4, 8)):
        num_bytes = task.num_micro * throughput.message_bytes(task, f"maxabs(bits={bits[0]})")
        assert sent[throughput.AQSGD[bits].name] == sent[throughput.DIRECT[bits].name] == num_bytes
    # Times to a loss take the step times of table 2, here or of an earlier run.
    timed = small.rows["table 2/throughput"]["by_round"]["100mbit"]
    again = ["--parts", "4", "--times", str(small.out / "aqsgd.json"), "--json", str(small.out / "again.json")]
    assert experiments_main(["aqsgd", "--smoke", *again, "--out", str(small.out / "again")]) == 0
    (later,) = json.loads((small.out / "again.json").read_text())["results"]
    for row in (small.rows["figure 4/sooner/100mbit"], later):
        assert row["rounds"] == {name: timed[name] for name in ("fp32", "direct fw4 bw8", "aq-sgd fw4 bw8")}


def cgx(small: Small) -> None:
    for model in ("gpt", "cnn"):

        def sent(figure: str, method: str, model: str = model) -> float:
            return small.rows[f"{figure}/items_per_s/{model}/{method}"]["payload_bytes"]

        # Of so small a network some is raw. INT8 to three others, against 3/2 of fp32.
        assert 4 < sent("3.6", "fp32") / sent("3.6", "thinwire") < 7.2
        assert sent("3.6", "fp32") / sent("3.6", "grace") == pytest.approx(2, rel=0.15)
        assert sent("3.4", "ring") == pytest.approx(sent("3.4", "sra"), rel=0.15)
        assert sent("3.4", "allgather") == pytest.approx(4 * sent("3.4", "sra"), rel=0.15)
    mean = small.rows["3.4/error/gpt"]["mean"]
    assert 0 < mean["sra"] < mean["ring"] < 1


def fft(small: Small) -> None:
    # Of so small a network much is raw.
    assert small.rows["14/speedup/fft"]["ratio"] > 3
    for theta in fft_measurements.ALPHA_THETAS:
        assert 0 < small.rows[f"12/alpha/{theta}"]["value"] < 1


def fullstack(small: Small) -> None:
    smoke = FULLSTACK.smoke
    assert all(small.rows["figure 10/table"]["alike"])
    # A header a message, activations in 32 bits, and the first stage's gradient once around two ranks.
    sent, config = small.rows["figure 5/throughput"]["step_bytes"], smoke.timed.model
    activations = smoke.timed.num_micro * (64 + 4 * smoke.timed.message_values)
    block = 12 * config.width**2 + 13 * config.width
    assert sent["fp32"] == activations + 4 * (config.vocabulary * config.width + config.layers // 2 * block)
    for method in (ACTIVATIONS.name, ONLY_GRADIENTS.name):
        assert sent[AQSGD.name] < sent[method] < sent["fp32"]


def qsdp(small: Small) -> None:
    if lab.unavailable() is None:
        sent = small.rows["figure 5.3/step_s"]["payload_bytes"]
        # Of so small a network some is raw.
        assert 3.2 < sent["raw"] / sent["W8G8"] < 4
        assert 5 < sent["raw"] / sent["W4G4"] < 8
    for size in SIZES_SMOKE:
        row = small.rows[f"table 5.1/lost/{size.name}/2 ranks"]
        # Of 8 bits so little is lost that no training can miss it by far.
        assert row["perplexities"] == pytest.approx(row["baseline_perplexities"], rel=0.05)
        assert row["of_weights_as_kept"][0] == pytest.approx(row["perplexities"][0], rel=0.01)
    row = small.rows["L-GreCo/lost/reference"]
    (plan,), (ours,), (reference,) = row["plans"], row["step_bytes"], row["reference_bytes"]
    # Evaluations gather weights, too, which the policy counts: of so short a training that is a large part.
    assert ours < 1.05 * reference
    assert len({spec.partition(",")[0] for spec in plan.values() if spec.startswith("minmax")}) > 1


class Version(NamedTuple):
    """A paper's small version, and what must be true of it."""

    paper: Paper[Any]
    undecided: str
    """What one seed's quality or one round's speed leaves open: a pattern of rows' names."""
    rows: Callable[[Small], None] = lambda _: None
    missing: str = "-"
    """Claims whose rows a small version need not have."""


VERSIONS = {
    "aqsgd": Version(PIPELINES, "figure [378]/|table 2/", aqsgd, missing="figure 4/sooner/500mbit|links"),
    # Errors have several steps.
    "cgx": Version(CGX, r"(?!3\.4/)", cgx),
    "fft": Version(FFT, r"table 2/accuracy/fft$|14/speedup/fft$", fft, missing="10/"),
    "fullstack": Version(FULLSTACK, "figure 5/(loss|faster)|adam/|figure 10/loss", fullstack, missing="appendix"),
    "intsgd": Version(INTSGD, "[23]/(quality/intsgd|communication/intsgd over sgd)$"),
    # Too few plans predict no times.
    "lgreco": Version(LGRECO, ".*(/lost/|_over_uniform/|/speed_)", missing="figure B.6|section 4.6.5|equal bytes"),
    "qsdp": Version(QSDP, r"table (5\.|C\.2/)|figure (C\.[14]|5\.3)/|L-GreCo/", qsdp, missing=r"figure C\.[235]"),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", VERSIONS)
def test_the_small_version_makes_every_part_and_judges_every_claim(name: str, tmp_path: Path) -> None:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    paper, undecided, check_rows, missing = VERSIONS[name]
    small = small_version(name, tmp_path)
    assert small.code == 0, small.shown
    judged = {f"{claim.figure}/{claim.row}" for claim in paper.claims}
    if lab.unavailable() is None:  # else there are no slow links
        assert not [row for row in judged - small.rows.keys() if not re.match(missing, row)]
    for row_name, row in small.rows.items():
        assert row["found"] or row.get("why") or not row["claim"], row_name
        assert row["holds"] is None or not re.match(undecided, row_name), row_name
    drawn, recorded = ({p.stem for p in folder.glob("*.svg")} for folder in (tmp_path, BENCHMARKS / name))
    # Of some figures there is the record alone.
    assert not [stem for stem in drawn ^ recorded if not re.match(r"6(-|$)|C\.[25]|B\.6a|equal-bytes|links|10$", stem)]
    check_rows(small)
