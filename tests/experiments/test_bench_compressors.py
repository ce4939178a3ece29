"""``python -m experiments bench compressors``: errors and bytes are the compressors' own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.bench import claims, families
from experiments.bench.claims import Point, at_equal_bytes, at_the_settings, fft_points, interpolated, verdicts
from experiments.bench.gradients import Gradients, Moment, make_task, record
from experiments.bench.passes import Pass, measure_quality
from thinwire.compressors import FFT, QSGD, TernGrad, TopK, parse, registered
from thinwire_tools.compare import every

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"a": (48, 64), "b": (128, 40)}


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    generator = torch.Generator().manual_seed(0)
    numel = sum(math.prod(shape) for shape in LAYERS.values())
    before, now = (torch.randn(numel, generator=generator) for _ in range(2))
    return Gradients(LAYERS, (Moment(4, before, now),))


@pytest.mark.parametrize(
    "spec",
    [
        *("minmax(bits=4)", "minmax(bits=4, rounding=nearest)", "maxabs(scale=row, rounding=nearest)", "onebit", "raw"),
        *(
            "cast(fp16)",
            "topk(density=0.1)",
            "topk(density=0.1) | minmax(rounding=nearest)",
            "fft(theta=0.8)",
            "truncate(gamma=4)",
        ),
        *("randk(density=0.1)", "qsgd(bits=8)"),
    ],
)
def test_errors_and_bytes_are_those_of_the_compressor_layer_by_layer(spec: str, gradients: Gradients) -> None:
    compressor, x = parse(spec), gradients.moments[0].now
    (found,) = measure_quality(Pass(spec, LAYERS), gradients)
    parts = [part.view(shape) for part, shape in zip(x.split([48 * 64, 128 * 40]), LAYERS.values(), strict=True)]
    received = torch.cat([compressor.roundtrip(part, key=at).flatten() for at, part in enumerate(parts)])
    expected = float((received - x).norm() / x.norm())
    # Draws differ, so unbiased ones agree as far as so many elements make them.
    assert found.relative_error == pytest.approx(expected, rel=0.1 if compressor.traits.unbiased else 1e-4)
    num_bytes = sum(compressor.wire_bytes(shape) for shape in LAYERS.values())
    assert found.bytes_per_element == pytest.approx(num_bytes / x.numel())
    assert 0 < found.values_per_element <= found.bytes_per_element


def test_indices_are_distinguished_from_values(gradients: Gradients) -> None:
    (topk,) = measure_quality(Pass("topk(density=0.25)", LAYERS), gradients)
    # A bit an element says which; headers and padding are left.
    assert topk.bytes_per_element - topk.values_per_element == pytest.approx(1 / 8, abs=0.02)
    assert topk.values_per_element == pytest.approx(4 * 0.25, abs=0.03)
    (fft,) = measure_quality(Pass("fft(theta=0.5)", LAYERS), gradients)
    # Half as many components as elements; the second layer fills its last block with zeros.
    assert 1 / 16 < fft.bytes_per_element - fft.values_per_element < 1 / 9
    (dense,) = measure_quality(Pass("minmax", LAYERS), gradients)
    assert dense.bytes_per_element == dense.values_per_element


def test_a_bounded_message_counts_what_it_uses(gradients: Gradients) -> None:
    (few,) = measure_quality(Pass("threshold(lam=2.5, capacity=0.5)", LAYERS), gradients)
    (many,) = measure_quality(Pass("threshold(lam=1.0, capacity=0.5)", LAYERS), gradients)
    assert few.bytes_per_element < 0.5 * many.bytes_per_element


def test_state_comes_from_the_step_before_a_low_rank_gradient_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    low = (torch.randn(48, 2, generator=generator) @ torch.randn(2, 64, generator=generator)).flatten()
    found = measure_quality(
        Pass("powersgd(rank=2)", {"a": (48, 64)}), Gradients({"a": (48, 64)}, (Moment(1, low, low),))
    )
    assert found[0].relative_error < 1e-4
    assert found[0].cosine == pytest.approx(1)


def test_a_recorded_gradient_is_that_of_the_run() -> None:
    task = make_task("gpt", smoke=True)
    found = record(task, [2])
    assert all(len(shape) >= 2 and math.prod(shape) >= 1024 for shape in found.layers.values())
    model, first = task.build(0), next(task.batches(0, 0, 1))
    task.loss(model, first).backward()
    expected = torch.cat(
        [p.grad.flatten() for n, p in model.named_parameters() if n in found.layers and p.grad is not None]
    )
    assert torch.equal(record(task, [1]).moments[0].before, expected)
    assert not torch.equal(found.moments[0].before, found.moments[0].now)
    for steps in ([], [0], [3, 2], [task.steps]):
        with pytest.raises(ValueError, match="ascending"):
            record(task, steps)


def test_every_compressor_is_in_the_default_list() -> None:
    specs = " ".join(families.default_specs())
    # raw has no error, dgc is what its sparsifier is, and intdiana rounds as intsgd does, what gradients differ by from
    # those before; delta and direct are for activations: none says anything here.
    without = ("raw", "dgc", "intdiana", "delta", "direct")
    missing = [n for n in registered() if n not in specs and n not in without]
    assert not missing
    for spec in families.default_specs():
        compressor = parse(spec)
        assert families.family(compressor) != "other"
        assert 4 < len(families.source(compressor)) < 120
    assert families.source(parse("ef(topk | qsgd)")).startswith("Aji and Heafield 2017")
    assert families.source(parse("powersgd")) == "Vogels et al. 2019"
    assert families.family(parse("ef(randk(density=0.1))")) == "random"


@pytest.mark.skipif(not (ROOT / "tools" / "readme.py").exists(), reason="not in a source tree")
def test_the_readme_names_what_both_benchmarks_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    named = set(importlib.import_module("readme").COMPRESSORS.values())
    for measured in (families.default_specs(), every.EVERY):
        assert named <= {str(parse(spec)) for spec in measured}


def test_error_at_equal_bytes_is_on_a_straight_line_of_logarithms() -> None:
    curve = [(4.0, 0.01), (1.0, 1.0), (2.0, 0.1)]
    assert interpolated(curve, 2.0) == 0.1
    assert interpolated(curve, math.sqrt(2)) == pytest.approx(math.sqrt(0.1))
    assert interpolated(curve, 0.99) is None
    assert interpolated(curve, 4.01) is None
    assert interpolated([], 1.0) is None


def synthetic(topk_error: float) -> list[Point]:
    ffts = [Point(FFT(theta), error, size, size - 0.06) for theta, error, size in ((0.95, 0.8, 0.1), (0.5, 0.2, 0.7))]
    others = [Point(FFT(0.85, 32), 0.1, 0.3, 0.2), Point(FFT(0.85), 0.5, 0.25, 0.19)]
    return [
        *ffts,
        *others,
        Point(TopK(0.15), topk_error, 0.25, 0.19),
        Point(TopK(0.9), 0.01, 3.0, 2.9),
        Point(QSGD(3), 1.0, 0.4, 0.4),
        Point(QSGD(3, norm="linf"), 0.5, 0.4, 0.4),
        Point(TernGrad(), 2.0, 0.25, 0.25),
        Point(parse("topk(density=0.15) | minmax(bits=8)"), 0.25, 0.25, 0.19),
        Point(TopK(0.15, "sampled"), 0.25, 0.25, 0.19),
    ]


def test_the_claim_is_judged_for_each_other_one_and_both_ways_of_counting() -> None:
    points = synthetic(topk_error=0.4)
    assert len(fft_points(points)) == 3
    found = {(against, counted): said for against, counted, said in verdicts(at_equal_bytes(points))}
    assert set(found) == {(against, counted) for against in claims.AGAINST for counted in (True, False)}
    assert found["top-k", True] == (
        "does not hold: FFT has 1.25 times its error; 1 of 2 lie outside the bytes that FFT was measured at"
    )
    assert found["top-k, values coded", True].startswith("does not hold: FFT has 2.00 times")
    assert found["TernGrad", True] == "holds: FFT has 0.25 times its error"
    better = {(a, c): s for a, c, s in verdicts(at_equal_bytes(synthetic(topk_error=0.6)))}
    assert better["top-k", False].startswith("holds: FFT has 0.83 times")
    mixed = [*synthetic(0.4), Point(TopK(0.2), 0.9, 0.25, 0.19)]
    assert (
        "holds at 1 of 2 sizes, not beside topk(density=0.15): FFT has 0.56 to 1.25"
        in {(a, c): s for a, c, s in verdicts(at_equal_bytes(mixed))}["top-k", True]
    )


def test_at_the_papers_settings() -> None:
    found = {finding.against: finding for finding in at_the_settings(synthetic(0.4))}
    assert {finding.fft for finding in found.values()} == {"fft(theta=0.85, bits=10)"}
    assert {name: finding.holds for name, finding in found.items()} == {"top-k": False, "QSGD": True, "TernGrad": True}
    assert found["top-k"].ratio == pytest.approx(1.25)
    assert at_the_settings([Point(QSGD(3), 1.0, 0.4, 0.4)]) == []
    assert list(verdicts([])) == []
    alone = at_equal_bytes([Point(QSGD(3), 1.0, 0.4, 0.4)])
    assert next(said for _, _, said in verdicts(alone)).startswith("not comparable")


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"json": tmp_path / "out.json", "plot": tmp_path / "out.svg"}
    argv = ["bench", "compressors", "--smoke"]
    assert experiments_main([*argv, "--json", str(paths["json"]), "--plot", str(paths["plot"])]) == 0
    record_: dict[str, Any] = json.loads(paths["json"].read_text())
    rows = {row["name"]: row for row in record_["results"]}
    for spec in families.SMOKE:
        name = str(parse(spec))
        assert 0 < rows[f"relative_error/{name}"]["value"] < 4
        assert -1 <= rows[f"cosine/{name}"]["value"] <= 1
        assert 0 < rows[f"bytes_per_element/{name}"]["value"] < 4.2
        assert rows[f"encode_x_copy/{name}"]["value"] > 0
        assert rows[f"decode_x_copy/{name}"]["seconds"] > 0
        assert {"family", "meets", "unbiased", "feedback", "source", "by_step"} <= set(rows[f"relative_error/{name}"])
    assert rows["relative_error/powersgd(rank=2)"]["meets"] == "summed"
    assert rows["relative_error/terngrad()"]["meets"] == "gathered"
    claim = rows["fft_error_over/counted/terngrad()"]
    assert claim["holds"] == (claim["value"] < 1)
    assert record_["about"]["task"] == "gpt"
    shown = capsys.readouterr().out
    assert all(line in shown for line in record_["about"]["claim"])
    assert "<svg" in paths["plot"].read_text()


def test_what_cannot_be_measured_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments_main(["bench", "compressors", "quantise"]) == 64
    assert "no compressor" in " ".join(capsys.readouterr().err.split())
    assert experiments_main(["bench", "compressors", "--turns", "0"]) == 64
    if importlib.util.find_spec("experiments.papers.fft") is None:
        assert experiments_main(["bench", "compressors", "--task", "digits"]) == 64
        assert "repro fft" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(
    importlib.util.find_spec("experiments.papers.fft") is None, reason="without python -m experiments fft"
)
def test_gradients_of_the_digits() -> None:
    pytest.importorskip("sklearn")
    found = record(make_task("digits"), [1])
    assert found.numel == found.moments[0].now.numel() > 10_000
