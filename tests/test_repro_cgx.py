"""``thinwire repro cgx``: the small version from end to end, the turns, the rate of a link, every judgement."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire import cli, lab
from thinwire.collectives import parse_topology
from thinwire.repro.cgx import command, of_bandwidth, of_blob, of_places, of_quality, of_schemes, of_systems
from thinwire.repro.cgx.contest import Contest, Times, rate_text, solve_rate
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.cgx.study import FP32_SHARE, SMOKE, Scale
from thinwire.repro.cgx.ways import CGX, FP32, GRACE, NORM, NOTHING, THINWIRE, Way
from thinwire.repro.comparison import Comparison, Side
from thinwire.repro.crew import Crew, RankFailed
from thinwire.repro.fft.runs import Trained
from thinwire.repro.findings import Finding
from thinwire.repro.report import Run

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("3.1", "3.3", "3.4", "3.5", "3.6", "3.7", "3.9", "blob")
PICTURES = ("3.1", "3.3", "3.4", "3.6", "3.7", "3.9", "blob")
THROUGHPUT = ("3.3", "3.4", "3.6", "3.9", "blob")


# --- the command


@dataclass
class Small:
    """What the small version left behind."""

    code: int
    seconds: float
    out: Path
    record: dict[str, Any]
    shown: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {row["name"]: row for row in self.record["results"]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    out = tmp_path_factory.mktemp("cgx")
    path = out / "cgx.json"
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("rich.console.Console.print", lambda self, *what, **_: told.extend(str(part) for part in what))
        started = time.monotonic()
        code = cli.main(["repro", "cgx", "--smoke", "--out", str(out), "--json", str(path)])
        seconds = time.monotonic() - started
    return Small(code, seconds, out, json.loads(path.read_text(), parse_constant=_no_constant), "\n".join(told))


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    assert {row["figure"] for row in small.record["results"]} == set(PARTS)
    for row in small.record["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
        # One round and one seed decide nothing.
        assert row["holds"] is None or row["figure"] == "3.4", row
    for part in PARTS:
        assert any(row["claim"] for row in small.record["results"] if row["figure"] == part), part
    for part in PICTURES:
        assert (small.out / f"cgx-{part}.svg").read_text().startswith("<?xml")
    assert small.record["about"]["smoke"] is True
    assert "This takes about a minute." in small.shown


@pytest.mark.timeout(400)
def test_rows_of_throughput_say_what_travelled(small: Small) -> None:
    for model, unit in (("gpt", "tokens/s"), ("cnn", "images/s")):
        for part, way in (("3.6", "thinwire"), ("3.4", "ring"), ("3.3", "shared"), ("3.9", "hierarchical")):
            row = small.rows[f"{part}/items_per_s/{model}/{way}"]
            assert row["value"] > 0
            assert row["unit"] == unit
            assert len(row["step_s"]) == SMOKE.rounds
        sent = {
            way: small.rows[f"3.6/items_per_s/{model}/{way}"]["payload_bytes"] for way in ("fp32", "thinwire", "grace")
        }
        # Of so small a network some is raw. INT8 to three others, against 3/2 of fp32.
        assert 4 < sent["fp32"] / sent["thinwire"] < 7.2
        assert sent["fp32"] / sent["grace"] == pytest.approx(2, rel=0.15)
        sra, ring, gathered = (
            small.rows[f"3.4/items_per_s/{model}/{way}"]["payload_bytes"] for way in ("sra", "ring", "allgather")
        )
        assert ring == pytest.approx(sra, rel=0.15)
        assert gathered == pytest.approx(2 * sra, rel=0.15)
    assert small.rows["3.4/items_per_s/gpt/ring"]["thesis_relative"] == pytest.approx(236 / 260)


@pytest.mark.timeout(400)
def test_quantising_more_often_errs_more(small: Small) -> None:
    mean = small.rows["3.4/error/gpt"]["mean"]
    assert 0 < mean["sra"] < mean["ring"] < 1
    assert len(small.rows["3.4/error/gpt"]["by_step"]["tree"]) == SMOKE.error_steps


@pytest.mark.timeout(400)
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_links_are_told_with_what_they_make_of_fp32(small: Small) -> None:
    links = small.record["about"]["links"]
    assert len(links) == 4
    for link in links.values():
        assert link["rate"] == "100mbit"
        assert 0 < link["fp32_share"][0] < 1.5
        assert "fp32 reaches" in link["proportion"]
        assert link["proportion"] in small.shown
    assert [link["link"]["ranks_per_node"] for name, link in links.items() if "each node" in name] == [2, 2]


@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / "tools" / "readme.py").exists(), reason="not in a source tree")
def test_the_page_is_made_of_the_figures(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("repro_pages")
    assert "Not measured yet" in pages.repro_cgx(tmp_path)
    (tmp_path / "repro-cgx.json").write_text(json.dumps(small.record))
    page = pages.repro_cgx(tmp_path)
    for row in small.record["results"]:
        assert not row["claim"] or f"| {row['figure']} | {row['claim']} | {row['found']} | open |" in page
    for part in THROUGHPUT:
        assert pages.CGX_TABLES[part] in page
    assert "Transformer-XL in the thesis" in page
    assert "| ring | " in page
    assert " 0.91x |" in page


def test_a_rank_that_fails_costs_its_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run, killed = Crew.run, []

    def run_and_kill(crew: Crew, told: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
        if told["do"] == "turn" and not killed:
            killed.append(crew._members[1].process)
            killed[0].kill()
        return run(crew, told, *args)

    monkeypatch.setattr(Crew, "run", run_and_kill)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    monkeypatch.setattr(command, "SMOKE", replace(SMOKE, models=SMOKE.models[1:]))
    arguments = ["repro", "cgx", "--smoke", "--parts", "3.1", "3.7", "--out", str(tmp_path)]
    assert cli.main(arguments) == 1
    found = json.loads((tmp_path / "repro-cgx.json").read_text())
    assert found["about"]["failures"] == {"3.1": "rank 1: ended by signal 9"}
    assert {row["figure"] for row in found["results"]} == {"3.7"}
    assert found["about"]["links"] == {}
    shown = " ".join(capsys.readouterr().out.split())
    assert "no right to make namespaces" in shown
    assert "over loopback" in shown


def test_ranks_that_do_not_start_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")

    def refuse(*_: Any, **__: Any) -> None:
        raise RankFailed(0, "it ended", "no such module")

    monkeypatch.setattr("thinwire.repro.crew.Crew", refuse)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    assert cli.main(["repro", "cgx", "--smoke", "--parts", "3.1", "3.4", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "repro-cgx.json").read_text())
    assert found["about"]["failures"] == dict.fromkeys(("3.1", "3.4"), "rank 0: it ended")
    assert "no such module" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "3.4", "3.8"], "choose among 3.1 3.3 3.4"),
        (["--parts", ","], "choose among"),
        (["--seeds", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--rate", "fast"], "not a rate"),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["repro", "cgx", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


# --- what is timed


def test_every_way_is_one_of_the_thesis() -> None:
    numel = 1 << 20
    assert 8 * thinwire.parse(CGX).wire_bytes((numel,)) / numel == pytest.approx(4.5, rel=0.01)
    assert thinwire.parse(GRACE).wire_bytes((numel,)) / numel == pytest.approx(1, rel=0.01)
    assert str(thinwire.parse(NORM)).startswith("qsgd(bits=4, bucket=128")
    ideal = thinwire.parse(of_systems.IDEAL.spec)
    assert ideal.wire_bytes((numel,)) < 1e-3 * 4 * numel
    scale = Scale()
    lists = [of_bandwidth.ways(scale), of_schemes.ways(scale), of_systems.shares(scale), of_places.nodes(scale)]
    lists += [of_places.transports(scale), of_blob.ways(scale), *(of_systems.systems(model) for model in scale.models)]
    for ways in lists:
        assert len({way.name for way in ways}) == len(ways)
        for way in ways:
            if way.kind in ("thinwire", "blob"):
                thinwire.parse(way.spec)
                parse_topology(way.topology)
    assert [model.powersgd_rank for model in scale.models] == [8, 4]
    assert all(4e6 < model.gradient_bytes < 9e6 for model in scale.models)


def test_turns_are_taken_by_all_and_counted_after_the_first() -> None:
    pytest.importorskip("sklearn")
    told: list[tuple[int, str]] = []
    with Contest("host", emulated=False) as contest:
        found = contest.times(
            SMOKE.models[1],
            (FP32, THINWIRE, NOTHING),
            rounds=2,
            steps=3,
            rate=None,
            on_turn=lambda steps, title: told.append((steps, title)),
        )
    assert {name: len(rounds) for name, rounds in found.rounds.items()} == {"fp32": 2, "thinwire": 2, "nothing": 2}
    assert all(seconds > 0 for rounds in found.rounds.values() for seconds in rounds)
    assert [title for _, title in told] == [
        *("nothing sent", "thinwire", "DDP fp32"),
        *("DDP fp32", "thinwire", "nothing sent"),
        *("nothing sent", "thinwire", "DDP fp32"),
    ]
    assert {steps for steps, _ in told} == {3}
    assert set(found.payload_bytes) == {"fp32", "thinwire"}
    # Four ranks: 2 · 3/4 of the gradient.
    assert found.payload_bytes["fp32"] == 1.5 * SMOKE.models[1].gradient_bytes


def test_errors_are_those_of_what_arrives() -> None:
    pytest.importorskip("sklearn")
    half = Way("half", "half", "#000000", spec="truncate(gamma=2)")
    with Contest("host", emulated=False) as contest:
        found = contest.errors(SMOKE.models[1], (FP32, THINWIRE, half), steps=3, on_turn=lambda steps, title: None)
    assert {name: len(errors) for name, errors in found.items()} == {"fp32": 3, "thinwire": 3, "half": 3}
    assert max(found["fp32"]) < 1e-6
    assert all(0.02 < error < 0.5 for error in found["thinwire"])
    assert all(0.3 < error < 1 for error in found["half"])


def test_ways_are_compared_round_by_round() -> None:
    times = Times({"slow": (2.0, 8.0, 3.0), "fast": (1.0, 2.0, 1.5)}, {})
    assert times.over("fast", "slow") == [2.0, 4.0, 2.0]
    assert times.times_faster("slow", "fast") == 0.5
    assert times.step_s("slow") == 3.0


def test_the_rate_at_which_a_step_takes_a_time() -> None:
    def step_s(rate: float) -> float:
        return 0.2 + 50e6 / rate

    fast, slow = (400e6, step_s(400e6)), (200e6, step_s(200e6))
    assert solve_rate(fast, slow, 0.4) == pytest.approx(250e6)
    assert solve_rate(fast, slow, 0.7) == pytest.approx(100e6)
    # Whatever noise makes of it, it stays near what was measured.
    assert solve_rate(fast, slow, 0.201) == 8 * 400e6
    assert solve_rate(fast, slow, 100.0) == 200e6 / 8
    assert solve_rate((400e6, 0.5), (200e6, 0.4), 1.0) == 400e6
    assert [rate_text(rate) for rate in (287_600_000, 4_449_000, 1.26e9)] == ["290mbit", "4.4mbit", "1300mbit"]
    assert lab.parse_rate(rate_text(4_449_000)) == 4_400_000


def test_the_thesis_s_own_baseline_calibrates_the_links() -> None:
    # Tables 3.1, 3.6 and 3.9; of ResNet-50 table 3.7 tells linear scaling.
    assert FP32_SHARE["links"]["gpt"] == pytest.approx(170 / (8 * 39), abs=0.01)
    assert FP32_SHARE["links"]["cnn"] == pytest.approx(1900 / (2900 / 0.90), abs=0.01)
    assert FP32_SHARE["nodes"]["gpt"] == pytest.approx(32 / (16 * 39), abs=0.01)
    assert FP32_SHARE["nodes"]["cnn"] == pytest.approx(564 / (2 * 2900 / 0.90), abs=0.01)


def test_a_proportion_is_told() -> None:
    text = command.proportion("GPT", "290mbit", [0.5, 0.4, 0.9])
    assert text.startswith("GPT of 290 Mbit/s: fp32 reaches 50% ")
    assert "1.0 times as long" in text


# --- judging


def test_a_claim_holds_where_chance_would_not_do_it() -> None:
    assert above([1.1] * 8) is True
    assert above([1.1] * 7 + [0.5]) is True
    assert above([1.1] * 6 + [0.5] * 2) is None
    assert above([0.9] * 7 + [1.5]) is False
    assert above([1.0] * 8) is None
    assert above([1.1] * 4) is None
    assert above([1.1] * 5) is True
    assert above([1.1] * 5, 1.2) is False
    assert above([math.nan] * 8) is None
    assert all_hold([True, True]) is True
    assert all_hold([True, None]) is None
    assert all_hold([None, False]) is False


class _Study:
    """A study whose measurements are made up: seconds by name of the way, the same for both networks."""

    scale = Scale()

    def __init__(self, out: Path, seconds: dict[str, float], errors: dict[str, float] | None = None) -> None:
        self._out, self._seconds, self._errors = out, seconds, errors or {}
        self.emulated = True

    def picture(self, part: str) -> Path:
        return self._out / f"cgx-{part}.svg"

    def where(self, model: Any, place: str = "links") -> str:
        return "over 200 Mbit/s"

    def verdict(self, holds: bool | None, place: str = "links") -> bool | None:
        return holds if self.emulated else None

    def times(self, model: Any, ways: Sequence[Way], place: str = "links") -> Times:
        # A little noise, the same for all.
        noise = [1.0, 1.02, 0.99, 1.01, 1.0, 0.98, 1.03, 1.0]
        return Times({way.name: tuple(self._seconds.get(way.name, 1.0) * n for n in noise) for way in ways}, {})

    def errors(self, model: Any, ways: Sequence[Way]) -> dict[str, list[float]]:
        return {way.name: [self._errors[way.name] * (1 + 0.01 * step) for step in range(8)] for way in ways}


def _verdicts(rows: Sequence[Finding]) -> dict[str, bool | None]:
    return {row.name: row.holds for row in rows if row.claim}


@pytest.fixture
def made_up(tmp_path: Path) -> Any:
    pytest.importorskip("matplotlib")

    def make(seconds: dict[str, float], errors: dict[str, float] | None = None) -> Any:
        return _Study(tmp_path, seconds, errors)

    return make


def _by_gamma(*seconds: float) -> dict[str, float]:
    return {f"gamma {gamma:g}": value for gamma, value in zip(Scale().gammas, seconds, strict=True)}


def test_bandwidth_is_the_bottleneck_where_less_of_it_brings_the_ideal(made_up: Any, tmp_path: Path) -> None:
    nears = _by_gamma(2.0, 1.6, 1.4, 1.2, 1.15, 1.12, 1.1, 1.05)
    found = _verdicts(of_bandwidth.figure_3_1(made_up({**nears, "nothing": 1.0, "fp32": 2.0})))
    assert found == {
        "share_of_ideal/gpt": True,
        "gained_by_an_order/gpt": True,
        "gained_by_two_orders/gpt": True,
        "share_of_ideal/cnn": True,
        "gained_by_an_order/cnn": True,
    }
    assert (tmp_path / "cgx-3.1.svg").exists()
    # Something else is in the way: less is sent, and steps stay long.
    stays = _by_gamma(2.0, 1.9, 1.9, 1.9, 1.8, 1.7, 1.7, 1.5)
    found = _verdicts(of_bandwidth.figure_3_1(made_up({**stays, "nothing": 1.0, "fp32": 2.0})))
    assert found["share_of_ideal/gpt"] is False
    assert found["gained_by_an_order/gpt"] is False
    # There is nothing to gain.
    fast = _by_gamma(*[1.02] * 7, 1.01)
    found = _verdicts(of_bandwidth.figure_3_1(made_up({**fast, "nothing": 1.0, "fp32": 1.02})))
    assert found["share_of_ideal/gpt"] is False
    assert found["gained_by_two_orders/gpt"] is None


def test_schemes_are_judged_by_speed_and_error(made_up: Any) -> None:
    seconds = {"sra": 1.0, "ring": 1.1, "tree": 1.3, "nothing": 0.8}
    study = made_up(seconds, {"sra": 0.1, "ring": 0.13, "tree": 0.12})
    rows = of_schemes.table_3_4(study)
    expected = [f"{claim}/{model}" for model in ("gpt", "cnn") for claim in ("sra_fastest", "ring_over_tree")]
    assert _verdicts(rows) == {**dict.fromkeys(expected, True), "error/gpt": True}
    values = {row.name: row for row in rows}
    ring = values["items_per_s/cnn/ring"]
    assert ring.value == pytest.approx(4 * 96 / 1.1, rel=0.01)
    assert ring.more["relative"] == pytest.approx(1 / 1.1)
    assert ring.more["thesis_relative"] == pytest.approx(2830 / 2900)
    assert values["items_per_s/cnn/allgather"].more["thesis"] is None
    study = made_up({**seconds, "sra": 1.2}, {"sra": 0.1, "ring": 0.13, "tree": 0.09})
    found = _verdicts(of_schemes.table_3_4(study))
    assert found["sra_fastest/gpt"] is False
    assert found["error/gpt"] is False
    study.emulated = False
    assert _verdicts(of_schemes.table_3_4(study))["sra_fastest/gpt"] is None


def test_systems_are_judged_against_each_other(made_up: Any) -> None:
    seconds = {"fp32": 2.0, "thinwire": 1.1, "torch powersgd": 1.3, "powersgd": 1.0, "grace": 3.0, "nothing": 0.9}
    found = _verdicts(of_systems.table_3_6(made_up(seconds)))
    expected = {"thinwire/fp32": True, "thinwire/torch powersgd": True, "thinwire/powersgd": False}
    expected |= {"thinwire/grace": True, "fp32/grace": True}
    assert found == {f"faster/{model}/{pair}": holds for model in ("gpt", "cnn") for pair, holds in expected.items()}
    found = _verdicts(of_systems.table_3_6(made_up({**seconds, "grace": 1.5})))
    assert found["faster/gpt/fp32/grace"] is False


def test_shares_are_judged_by_what_the_thesis_reaches(made_up: Any) -> None:
    seconds = {"fp32": 2.0, "thinwire": 1.15, "ideal": 1.05, "nothing": 1.0}
    rows = of_systems.table_3_7(made_up(seconds))
    assert set(_verdicts(rows).values()) == {True}
    assert rows[0].value == pytest.approx(1 / 1.15)
    found = _verdicts(of_systems.table_3_7(made_up({**seconds, "thinwire": 1.4})))
    assert set(found.values()) == {False}
    found = _verdicts(of_systems.table_3_7(made_up({**seconds, "thinwire": 1.4, "ideal": 1.35})))
    assert found == {
        **{f"share_of_linear/{model}": False for model in ("gpt", "cnn")},
        **{f"share_of_ideal/{model}": True for model in ("gpt", "cnn")},
    }


def test_transports_and_nodes_are_judged(made_up: Any) -> None:
    found = _verdicts(of_places.figure_3_3(made_up({"shared": 1.0, "group": 1.2})))
    assert found == {f"shared_over_gloo/{model}": True for model in ("gpt", "cnn")}
    found = _verdicts(of_places.figure_3_3(made_up({"shared": 1.2, "group": 1.0})))
    assert set(found.values()) == {False}
    # 3.5 times: more than Transformer-XL's 2.7, less than ResNet-50's 4.1.
    rows = of_places.table_3_9(made_up({"fp32": 7.0, "thinwire": 2.0, "hierarchical": 1.0}))
    assert _verdicts(rows) == {"speedup/gpt/thinwire": True, "speedup/cnn/thinwire": False}
    assert next(row for row in rows if row.name == "speedup/gpt/hierarchical").value == pytest.approx(7)


def test_compression_without_layers_is_judged_by_speed_and_error(made_up: Any) -> None:
    seconds = {"fp32": 2.0, "thinwire": 1.0, "blob": 1.5}
    errors = {"thinwire": 0.1, "blob": 0.11, "thinwire 1024": 0.2, "blob 1024": 0.25}
    found = _verdicts(of_blob.blob(made_up(seconds, errors)))
    names = ("blob_over_fp32", "layers_over_blob", "error")
    assert found == {f"{name}/{model}": True for model in ("gpt", "cnn") for name in names}
    found = _verdicts(of_blob.blob(made_up({**seconds, "blob": 0.9}, {**errors, "blob 1024": 0.19})))
    assert [found[f"{name}/gpt"] for name in names] == [True, False, False]
    assert _verdicts(of_blob.blob(made_up({**seconds, "blob": 2.5}, errors)))["blob_over_fp32/gpt"] is False


# --- quality


def _trained(accuracy: float) -> Trained:
    return Trained((0.1, 0.2), 0.15, (2.0, 1.0), (2,), (0.1, accuracy), (2.3, 1.0), 8.0, accuracy, 1.0, ())


def _by_seed(*accuracies: float) -> list[Trained]:
    return [_trained(accuracy) for accuracy in accuracies]


def test_accuracy_is_judged_where_the_control_fails() -> None:
    pytest.importorskip("scipy")
    same, lost = _by_seed(0.95, 0.961, 0.955), _by_seed(0.90, 0.91, 0.905)
    found = {
        None: _by_seed(0.95, 0.96, 0.955),
        "minmax(bits=4, bucket=128)": same,
        "qsgd(bits=4, bucket=128)": lost,
        of_quality.CNN_CONTROL: lost,
    }
    rows = of_quality.cnn_rows(found, 0.01)
    assert _verdicts(rows) == {"lost/cnn/minmax(bits=4, bucket=128)": True, "lost/cnn/qsgd(bits=4, bucket=128)": False}
    assert "damage is seen" in rows[-1].found
    # Within 1 % of the baseline's 95.5 %, not of 100 %.
    barely = {**found, "minmax(bits=4, bucket=128)": _by_seed(0.9405, 0.9505, 0.9455)}
    assert _verdicts(of_quality.cnn_rows(barely, 0.01))["lost/cnn/minmax(bits=4, bucket=128)"] is True
    beyond = {**found, "minmax(bits=4, bucket=128)": _by_seed(0.9403, 0.9503, 0.9453)}
    assert _verdicts(of_quality.cnn_rows(beyond, 0.01))["lost/cnn/minmax(bits=4, bucket=128)"] is False
    rows = of_quality.cnn_rows({**found, of_quality.CNN_CONTROL: same}, 0.01)
    assert set(_verdicts(rows).values()) == {None}
    assert "not shown" in rows[-1].found


def _side(name: str, *losses: float) -> Side:
    return Side(name, 1e-3, tuple(Run(name, val_loss=loss) for loss in losses))


def test_loss_is_judged_where_the_control_fails() -> None:
    pytest.importorskip("scipy")
    base = _side("fp32", 2.0, 2.1, 2.05)
    sides = (_side(CGX, 2.001, 2.1, 2.051), _side(NORM, 2.2, 2.3, 2.25))
    found = Comparison((0, 1, 2), 0.01, False, base, sides, _side("control", 2.4, 2.5, 2.45), {})
    rows = of_quality.gpt_rows(found)
    assert _verdicts(rows) == {f"lost/gpt/{CGX}": True, f"lost/gpt/{NORM}": False}
    assert "damage is seen" in rows[-1].found
    rows = of_quality.gpt_rows(replace(found, control=_side("control", 2.0, 2.6, 2.05)))
    assert set(_verdicts(rows).values()) == {None}
    assert all("says nothing" in row.found for row in rows[:-1])


def test_the_steps_that_are_foretold_are_those_of_all_runs() -> None:
    gpt, cnn = Scale().trained
    assert of_quality.num_steps(Scale()) == 3 * (4 * gpt.steps + 5 * cnn.steps)
