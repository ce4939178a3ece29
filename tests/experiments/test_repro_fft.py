"""``python -m experiments fft``: the small version from end to end, what receivers see, the methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from experiments.__main__ import main as experiments_main
from experiments.framework.training import Gradients
from experiments.papers.fft import measurements, methods, reconstruct
from thinwire.compressors import MinMax, at_step
from thinwire_tools import lab
from thinwire_tools.compare.rank_processes import RankFailed, RankProcesses

PARTS = ("5", "6", "10", "12", "13", "t2", "14", "15", "16")
FIGURES = ("5", "6", "10", "12", "13", "14", "15", "16")


# --- the command


def test_the_small_version_makes_every_figure_and_judges_every_claim(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    path = tmp_path / "fft.json"
    arguments = ["fft", "--smoke", "--parts", *PARTS, "--out", str(tmp_path), "--json", str(path)]
    assert experiments_main(arguments) == 0, capsys.readouterr()
    found = json.loads(path.read_text(), parse_constant=_no_constant)
    assert found["about"]["images"] == {"name": "digits", "train": 898, "held_out": 899}
    assert {row["figure"] for row in found["results"]} == {*FIGURES, "table 2"}
    for row in found["results"]:
        assert row["found"] or not row["claim"]
        assert row["holds"] in (True, False, None)
    for name in set(FIGURES) - {"6", "12"}:
        assert any(row["claim"] for row in found["results"] if row["figure"] == name), name
    for name in FIGURES:
        assert (tmp_path / f"fig{name}.svg").read_text().startswith("<?xml")
    rows = {row["name"]: row for row in found["results"]}
    for method in ("fp32", "fft", "topk", "qsgd", "terngrad", "fft ef", "topk ef", "qsgd ef", "terngrad ef"):
        assert 0 <= rows[f"table 2/accuracy/{method}"]["value"] <= 1
        assert rows[f"14/speedup/{method}"]["payload_bytes"] > 0
    # One seed decides nothing.
    assert rows["table 2/accuracy/fft"]["holds"] is None
    assert rows["14/speedup/fft"]["holds"] is None
    # Of so small a network much is raw.
    assert rows["14/speedup/fft"]["ratio"] > 3
    for theta in measurements.ALPHA_THETAS:
        assert [step for step, _ in rows[f"12/alpha/{theta}"]["samples"]] == [0, 3, 6, 9]
        assert 0 < rows[f"12/alpha/{theta}"]["value"] < 1
    assert list(rows["16/scaling/fft"]["by_world_size"]) == ["1", "2"]
    shown = capsys.readouterr().out
    assert "holds" in shown
    assert "Ethernet" in shown


def test_a_rank_that_fails_costs_its_figure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RankProcesses.run

    def run_and_kill(ranks: RankProcesses, command: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
        if command["do"] == "train":
            ranks.process(1).kill()
        return run(ranks, command, *args)

    monkeypatch.setattr(RankProcesses, "run", run_and_kill)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    assert experiments_main(["fft", "--smoke", "--parts", "6", "13", "5", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "repro-fft.json").read_text())
    assert found["about"]["failures"] == {"13": "rank 1: ended by signal 9"}
    assert found["about"]["link"] == "loopback"
    assert {row["figure"] for row in found["results"]} == {"5", "6"}
    assert "no right to make namespaces" in " ".join(capsys.readouterr().out.split())


def test_ranks_that_do_not_start_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RankFailed(0, "it ended", "no such module")

    monkeypatch.setattr("thinwire_tools.compare.rank_processes.RankProcesses", refuse)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    assert experiments_main(["fft", "--smoke", "--parts", "6", "16", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "repro-fft.json").read_text())
    assert found["about"]["failures"] == {"16": "rank 0: it ended"}
    assert "no such module" in capsys.readouterr().out


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "5", "7"], "choose among 5 6 10"),
        (["--parts", ","], "choose among"),
        (["--seeds", "0"], "at least 1"),
        (["--steps", "1"], "at least 2"),
        (["--rate", "fast"], "not a rate"),
        (["--data", "/nonexistent/folder"], "unpack the binary version"),
    ],
)
def test_wrong_arguments_are_reported_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert experiments_main(["fft", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


# --- reconstruction


def _gradients(ranks: int = 2) -> Gradients:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(tuple(torch.randn(8, 16, generator=generator) for _ in range(2)) for _ in range(ranks))
    return Gradients((0,), ("one", "two"), (layers,))


def test_a_reconstruction_is_the_mean_of_what_each_rank_sends() -> None:
    gradients = _gradients()
    exact = [torch.stack([rank[i].flatten() for rank in gradients.layers[0]]).mean(0) for i in range(2)]
    codec = MinMax(bits=4, bucket=128, rounding="nearest")
    found = reconstruct.reconstruct(gradients, 0, codec)
    assert torch.allclose(found.exact, torch.cat(exact))
    # Nearest rounding: within half a unit of each rank's range over fifteen steps.
    widest = max(float(layer.max() - layer.min()) for rank in gradients.layers[0] for layer in rank)
    assert 0 < float(found.errors.max()) <= widest / 30 * 1.001
    assert found.relative_error == pytest.approx(float(found.errors.norm() / found.exact.norm()))


def test_histograms_and_shares() -> None:
    edges = np.array([-1.0, 0.0, 1.0])
    same = reconstruct.Reconstruction(torch.tensor([-0.5, 0.5, -3.0, 3.0]), torch.tensor([-0.1, 0.9, -0.2, 7.0]))
    assert reconstruct.histogram(same.exact, edges).tolist() == [0.5, 0.5]
    assert reconstruct.distance(same, edges) == 0
    other = reconstruct.Reconstruction(torch.tensor([-0.5, -0.5]), torch.tensor([0.5, 0.5]))
    assert reconstruct.distance(other, edges) == 1
    errors = {"a": torch.zeros(10), "b": torch.ones(10), "c": torch.full((10,), 2.0)}
    found = {name: reconstruct.quantiles(values) for name, values in errors.items()}
    assert reconstruct.share_with_least_error(found, "a") == 1
    assert reconstruct.share_with_least_error(found, "b") == 0
    assert reconstruct.share_with_least_error(found, "b", ["c"]) == 1


def test_the_largest_layer_is_a_part_of_the_whole() -> None:
    gradients = _gradients()
    codec = MinMax(bits=4, bucket=128, rounding="nearest")
    assert reconstruct.largest_layer(gradients) == 0
    whole = reconstruct.reconstruct(gradients, 0, codec)
    second = reconstruct.reconstruct_layer(gradients, 0, 1, codec)
    assert torch.equal(whole.exact[128:], second.exact)
    assert torch.equal(whole.received[128:], second.received)


# --- the methods


def test_every_spec_is_a_compressor_of_the_paper() -> None:
    lossy, fed_back = ([thinwire.parse(m.spec) for m in chosen] for chosen in (methods.LOSSY, methods.FEEDBACK))
    assert [codec.traits.wants_feedback for codec in lossy] == [False] * 4
    assert all(codec.traits.wants_feedback or codec.spec_name == "ef" for codec in fed_back)
    for method in methods.convergence(10, 0.02).values():
        assert method.kind == "ddp" or thinwire.parse(method.spec)


def test_a_layer_arrives_in_as_many_values_as_the_paper_shows() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    clusters = {m.name: thinwire.parse(m.spec).roundtrip(x).unique().numel() for m in (methods.QSGD, methods.TERNGRAD)}
    assert clusters == {"qsgd": 7, "terngrad": 3}


def test_messages_are_as_long_as_the_paper_counts() -> None:
    numel = 1 << 20
    bits = {m.name: 8 * thinwire.parse(m.spec).wire_bytes((numel,)) / numel for m in methods.LOSSY}
    # 15 % of half as many complex numbers of twice 10 bits, and a bitmap of theirs; 15 % of 32 bits, and a bitmap.
    assert bits["fft"] == pytest.approx(32 / 21.3 + 0.5, rel=0.01)
    assert bits["topk"] == pytest.approx(32 / 6.67 + 1, rel=0.01)
    assert bits["qsgd"] == pytest.approx(32 / 10.6, rel=0.01)
    assert bits["terngrad"] == pytest.approx(32 / 16.0, rel=0.01)


def test_theta_follows_the_learning_rate_from_where_it_begins() -> None:
    codec = thinwire.parse(methods.diminishing(0.99, 0.02).spec)
    thetas = [at_step(codec, 0, rate).theta for rate in (0.02, 0.002)]
    # In steps of a 64th, rounded down: θ² falls to a tenth with the learning rate.
    assert thetas == [pytest.approx(0.99, abs=1 / 64), pytest.approx(0.99 / 10**0.5, abs=1 / 64)]


def test_theta_drops_to_0_at_its_step() -> None:
    codec = thinwire.parse(methods.dropped(0.9, 288).spec)
    numel = 1 << 16
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    before, after = (at_step(codec, step, None) for step in (287, 288))
    assert float((before.roundtrip(x) - x).norm() / x.norm()) > 0.5
    # Nothing is dropped; what is left is the rounding of ten bits.
    assert float((after.roundtrip(x) - x).norm() / x.norm()) < 0.02
    assert before.wire_bytes((numel,)) < after.wire_bytes((numel,)) < 0.4 * 4 * numel
