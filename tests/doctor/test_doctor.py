"""``thinwire doctor``: what it finds over slow links and without one, what it leaves alone, what it says and writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from doctor_training import train
from harness import run_ranks
from thinwire.collectives import World
from thinwire.compressors import parse
from thinwire.plan.forecast import Bucket, Curve, HierarchyTimes, Links, Pace
from thinwire.runtime.probe import Pair
from thinwire_tools import lab
from thinwire_tools.doctor import examine, page
from thinwire_tools.doctor.advice import conclude, verdict
from thinwire_tools.doctor.measure import Measured, interface_rate, over_links
from thinwire_tools.doctor.observer import DoctorError, Observer, Watched
from thinwire_tools.doctor.record import Prices, record
from thinwire_tools.doctor.settings import (
    BY_LINK,
    SETTINGS,
    TODAY,
    Care,
    Prediction,
    Setting,
    choose_algorithm,
    local_updates,
    needed_compressors,
    predict_ddp,
    settings_with,
)

SCRIPT = str(Path(__file__).parents[1] / "support" / "doctor_training.py")
SHAPES = {"a": (1000, 500), "b": (1000, 250)}


def measured(bytes_per_s: float, *, now: float, codec_s: float = 1e-9) -> Measured:
    """Two ranks, 3 MB of gradients, 0.2 s of computing."""
    pace = Pace((Bucket(0.1, (("a", SHAPES["a"]),)), Bucket(0.15, (("b", SHAPES["b"]),))), 0.2)
    curve = Curve(((0.0, 1e-3), (1e7, 1e-3 + 1e7 / bytes_per_s)))
    watched = Watched((pace,) * 3, (now,) * 3, ((0.1, 0.05),) * 3, 1, 750_000, ("float32",))
    codecs = dict.fromkeys(needed_compressors(SETTINGS, SHAPES), (codec_s / 2, codec_s / 2))
    pairs = (Pair(0, 1, bytes_per_s, 1e-3),)
    return Measured(watched, (Links(curve, curve, 2),), pairs, codecs, 2, 2, 1.0, 1, bytes_per_s / 0.9, "eth0")


def predictions(of: Measured) -> list[Prediction]:
    return [predict_ddp(setting, of) for setting in SETTINGS]


SLOW = measured(1e7, now=0.46)
"""80 Mbit/s: 2 MB from 0.1 s on take until 0.301, 1 MB behind them until 0.401: a step of 0.451 s."""
FAST = measured(1e10, now=0.203)


def test_where_links_differ_what_goes_over_them_may_differ_too() -> None:
    slow, fast = SLOW.links[0].native, Curve(((0.0, 1e-5), (1e7, 1e-5 + 1e7 / 1e10)))
    four = replace(SLOW.links[0], num_ranks=4)
    even, uneven = Links(slow, slow, 2), replace(four, rates=(1.0, 1.0, 1.0, 0.1))
    paired = replace(four, legs=HierarchyTimes(World(4, (0, 0, 1, 1)), fast, slow))
    found = [[str(choose_algorithm(setting, links)) for setting in BY_LINK] for links in (even, uneven, paired)]
    by_node, by_rate = "hierarchical(inside=dense, across=slices)", "sra(rates=(1.0, 1.0, 1.0, 0.1))"
    assert found == [["None", "None"], ["None", by_rate], [by_node, "None"]]
    star = Setting("", BY_LINK[0].spec)
    for setting, links in zip(BY_LINK, (paired, uneven), strict=True):
        ours, plain = (predict_ddp(s, replace(SLOW, links=(links,), num_ranks=4)) for s in (setting, star))
        assert ours.step.value < plain.step.value
    # 2 MB and 1 MB: half of them exact and half in 4.5 bits inside the node, twice a quarter in 4.5 bits across.
    by_nodes = predict_ddp(BY_LINK[0], replace(SLOW, links=(paired,), num_ranks=4))
    assert by_nodes.sent_bytes == pytest.approx(3e6 * (0.5 + 0.5 * 4.5 / 32 + 0.5 * 4.5 / 32), rel=0.01)
    assert 'network=thinwire.Network(algorithm="hierarchical(inside=dense)"))' in BY_LINK[0].lines[1]


def test_a_prediction_is_that_of_the_timeline() -> None:
    today = predict_ddp(TODAY, SLOW)
    assert today.step.value == pytest.approx(0.2 + 0.401 - 0.15)
    assert today.sent_bytes == 3_000_000
    assert today.wait_share == pytest.approx(0.251 / 0.451)
    two = next(predict_ddp(setting, SLOW) for setting in SETTINGS if setting.times == 2)
    assert two.step.value == pytest.approx((0.451 + 0.15) / 2)
    assert two.sent_bytes == 1_500_000


def test_a_slow_link_gets_the_mildest_thing_that_helps_as_much() -> None:
    found = verdict(SLOW, predictions(SLOW))
    assert found.sentence.startswith("Bound by communication: 57% of a step (460 ms) waits for it. With ")
    assert found.advice[0].setting is not None
    assert found.advice[0].setting.care <= Care.KEPT
    titles = [advice.title for advice in found.advice]
    assert "nothing" not in titles
    by_title = {p.setting.title: p.step.value for p in predictions(SLOW)}
    # What may change the loss comes behind what does not.
    assert titles.index("bf16") < titles.index("top-k, 1 %")
    assert by_title["4 bits"] < by_title["bf16"] < by_title["as it is"]


def test_a_fast_link_gets_nothing() -> None:
    found = verdict(FAST, predictions(FAST))
    assert found.sentence.startswith("Not bound by communication: 1.5% of a step")
    assert found.advice[0].title == "nothing"
    assert found.advice[0].lines == ()


def drawn(*shares: float, setting: Setting = SETTINGS[3]) -> Prediction:
    """A step of these shares of one as it is, whose seconds differ by half from draw to draw."""
    noise = [0.5, 0.75, 1.0, 1.25, 1.5] * 4
    return Prediction(setting, tuple(s * shares[i % len(shares)] for i, s in enumerate(noise)), 1.0, 0.0)


AS_IT_IS = drawn(1.0, setting=TODAY)


def test_draws_that_are_slow_for_all_hide_no_gain() -> None:
    half = drawn(0.5, 0.52)
    assert half.step.high > 0.7
    found = conclude(0.9, 0.5, [AS_IT_IS, half], lambda p: p)
    assert found.sentence.startswith("Bound by communication")
    assert found.advice[0].title == half.setting.title


def test_what_the_draws_do_not_settle_is_said_to_be_too_noisy() -> None:
    for shares in ((0.6, 1.3), (0.9, 0.96, 0.99, 1.01), (0.7, 1.0, 2.0, 3.0)):
        found = conclude(1.0, 0.5, [AS_IT_IS, drawn(*shares)], lambda p: p)
        assert "too noisy to tell" in found.sentence
        assert [advice.title for advice in found.advice] == ["measure again"]
    # Slower than one as it is in every draw, and yet faster than what was measured.
    found = conclude(1.5, 0.5, [AS_IT_IS, drawn(1.05)], lambda p: p)
    assert "too noisy to tell" in found.sentence
    assert "In doubt" in found.sentence


def test_the_reason_why_nothing_helps_is_computed() -> None:
    for at_once, why in {0.5: "the processors are slow", 0.97: "even if compressing took no"}.items():
        found = conclude(1.0, 0.5, [AS_IT_IS, drawn(1.1)], lambda p, share=at_once: drawn(share, setting=p.setting))
        assert "nothing here would make it at least 5% faster" in found.sentence
        assert [advice.title for advice in found.advice] == ["nothing"]
        assert why in found.advice[0].why


def test_one_bucket_is_the_first_thing_to_change() -> None:
    bucket = Bucket(0.15, (("a", (2000, 1000)),))
    watched = replace(SLOW.watched, paces=(Pace((bucket,), 0.2),) * 3)
    of = replace(SLOW, watched=watched)
    first = verdict(of, predictions(of)).advice[0]
    assert (first.title, first.lines) == ("smaller buckets", ("DistributedDataParallel(model, bucket_cap_mb=2)",))


def test_local_updates_are_as_rare_as_hides_them() -> None:
    # 750 000 elements in 2 bits, with a scale for every 256, are 199 kB: 20 ms at 80 Mbit/s, and 2 s at 0.8.
    for bytes_per_s, every in ((1e7, 10), (1e5, 250), (1e3, 500)):
        of = measured(bytes_per_s, now=0.46)
        setting = local_updates(of)
        assert setting.every == every
        found = predict_ddp(setting, of)
        assert found.step.value == pytest.approx(0.2 + (2e-3 + 199.4e3 / bytes_per_s) / every, rel=0.01)
        assert found.sent_bytes == pytest.approx(199.4e3 / every, rel=0.01)
    found = verdict(SLOW, [*predictions(SLOW), predict_ddp(local_updates(SLOW), SLOW)])
    assert found.advice[0].setting is not None
    assert found.advice[0].setting.care <= Care.KEPT  # another algorithm is never the first thing to do


def test_more_compressors() -> None:
    assert settings_with(["minmax(bits=4)"]) == (*SETTINGS, *BY_LINK)
    assert settings_with(["minmax(bits=3)"])[-1].spec == str(parse("minmax(bits=3)"))
    with pytest.raises(ValueError, match="minmaxx"):
        settings_with(["minmaxx"])


def made(of: Measured, prices: Prices | None = None) -> dict[str, Any]:
    found = predictions(of)
    about = {"script": ["train.py"], "link": ""}
    return record(of, found, verdict(of, found), about=about, prices=prices).to_dict()


def test_the_record_is_json_and_holds_what_is_shown() -> None:
    found = json.loads(json.dumps(made(SLOW, Prices(10.0, 64.0, "tokens")), allow_nan=False))
    values = {row["name"]: row["value"] for row in found["results"]}
    assert values["step_s/today"] == 0.46
    assert values["predicted_step_s/as it is"] == pytest.approx(0.451)
    assert values["cost/as it is"] == pytest.approx(1e6 * 10 / 3600 * 0.451 / 64)
    assert values["bandwidth/0-1"] == 1e7
    codec = next(row for row in found["about"]["codecs"] if row["title"] == "4 bits")
    # Both ways a byte of gradient takes 2.5e-10 s (a rank encodes one and decodes one and a half times): at 10 MB/s
    # equation 4 asks for a ratio of hardly more than 1.
    assert 1 < codec["minimal_ratio"] < 1.01
    assert codec["ratio"] == pytest.approx(32 / 4.5, rel=0.01)


def test_doubts_are_part_of_the_verdict() -> None:
    doubtful = replace(SLOW, watched=replace(SLOW.watched, step_s=(0.6,) * 3))
    sentence = verdict(doubtful, predictions(doubtful)).sentence
    assert sentence.startswith("Bound by communication")
    assert "-25% off the measured one" in sentence
    assert "In doubt" not in verdict(SLOW, predictions(SLOW)).sentence


def test_loopback_is_shown_beside_slower_links() -> None:
    over = {rate: [predict_ddp(s, over_links(FAST, rate)) for s in (TODAY, SETTINGS[3])] for rate in (125e6, 12.5e6)}
    # 3 MB at 12.5 MB/s, both ways of two ranks: 0.24 s, of which 0.05 s are hidden.
    assert over[12.5e6][0].step.value == pytest.approx(0.2 + 0.1 + 0.24 - 0.15, rel=0.01)
    assert over[125e6][0].step.value < 0.25
    assert over[12.5e6][1].step.value < 0.25
    found = predictions(FAST)
    about = {"script": ["train.py"], "link": "loopback"}
    made = record(FAST, found, verdict(FAST, found), about=about, elsewhere=list(over.items())).to_dict()
    assert "Over other links, predicted" in page.page(made)


def test_the_page_fetches_nothing_and_takes_text_for_text() -> None:
    hostile = made(SLOW, Prices(10.0, 64.0))
    hostile["about"]["verdict"] += "<script>alert(1)</script>"
    text = page.page(hostile)
    assert text.count("<svg") == 3
    assert not re.findall(r"<(?:script|link)|(?:src|href)=[\"'](?!#)|url\((?!#)", text)
    for part in ("Bound by communication", "DistributedDataParallel(model)", "top-k, 1 %", "Links", "90%"):
        assert part in text


def doctor(*options: str, tmp_path: Path, timeout: float = 250.0) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path / "doctor.json"
    argv = [sys.executable, "-m", "thinwire", "doctor", "--steps", "6", "--json", str(path), *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["COLUMNS"] = "100"
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=environment), path


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_nodes_of_two_ranks_are_measured_inside_and_between(tmp_path: Path) -> None:
    nodes = ("--ranks", "4", "--ranks-per-node", "2", "--rate", "20mbit")
    done, path = doctor(*nodes, "--", SCRIPT, "100", "0", str(tmp_path / "weights.pt"), tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {p["title"]: p for p in json.loads(path.read_text())["about"]["predictions"]}
    star, nodes_first = found["4 bits"], found["4 bits by node"]
    # Two thirds of the messages of each rank cross to the other node; added up inside nodes first, a third as many do.
    assert nodes_first["step_s"] < 0.8 * star["step_s"]
    assert nodes_first["algorithm"] == "hierarchical(inside=dense)"


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_a_script_over_a_slow_link(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    script = ("--", SCRIPT, "100", "0", str(weights))
    done, path = doctor("--rate", "50mbit", *script, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["about"]
    # A megabyte at 50 Mbit/s takes 0.17 s, and computing nearly nothing.
    assert found["exposed_share"] > 0.5
    assert found["line_rate"] == 50e6 / 8
    assert 0.3 < found["pairs"][0]["bandwidth"] / found["line_rate"] < 1.2
    assert found["advice"][0]["title"] != "nothing"
    assert "Bound by communication" in done.stdout
    # Ended by doctor, the script's own cleaning up was done on every rank.
    assert sorted(path.name for path in tmp_path.glob("*.ended.*")) == ["weights.pt.ended.0", "weights.pt.ended.1"]
    assert not weights.exists()


def _alone(rank: int) -> dict[str, torch.Tensor]:
    return train(16, 0.0)


def test_under_torchrun_a_script_that_computes_for_long_has_the_numbers_that_it_has_alone(tmp_path: Path) -> None:
    weights, path = tmp_path / "weights.pt", tmp_path / "doctor.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ours = ["-m", "thinwire", "doctor", "--steps", "6", "--keep-running", "--json", str(path)]
    argv = [*launcher, *ours, "--", SCRIPT, "16", "0.25", str(weights)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    # One report, not one from each rank.
    assert done.stdout.count("Links, both ways at once") == 1
    watched, alone = torch.load(weights, weights_only=True), run_ranks(_alone, 2)[0]
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    found = json.loads(path.read_text())["about"]
    assert found["compute_s"]["value"] > 0.25
    assert found["parameters"] == 256 * 512 + 512 + 512 * 256 + 256


@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_rank_in_one_line() -> None:
    command = [sys.executable, "-m", "thinwire", "doctor"]
    # A session of its own, whose processes all get the signal, as those of a terminal do.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as doctor:
        assert doctor.stderr is not None
        try:
            assert any(b"watching training" in line for line in doctor.stderr)
            os.killpg(doctor.pid, signal.SIGINT)
            rest = doctor.stderr.read().decode()
            assert doctor.wait(60) == 130
        finally:
            doctor.kill()
    assert rest.splitlines()[-1] == "thinwire doctor: interrupted"
    assert "Traceback" not in rest


def _examined(rank: int, kind: str) -> str:
    steps = {"ends itself": 2, "no model": 0}.get(kind, 5)
    try:
        if kind == "a hook":
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            thinwire.compress(model)
            with Observer(6, lambda observer: None):
                model(torch.ones(1, 64))
        with pytest.MonkeyPatch.context() as patch:
            end = sys.exit if kind == "ends itself" else bool
            patch.setattr(examine, "run_script", lambda script: end(steps and train(steps, 0.0) and 3))
            examine.Examination(examine.Request(steps=6, script=("train.py",))).run()
    except (DoctorError, RuntimeError) as error:
        return str(error)
    except SystemExit as end:
        return f"ended itself with {end.code}"
    return "nothing was wrong"


NOT_EXAMINED = {
    "too short": "before doctor had seen 10 training steps, and one more that begins",
    "ends itself": "ended itself with 3",
    "no model": "trained no DistributedDataParallel model",
    "a hook": "take thinwire.compress() or register_comm_hook() out of the script",
}


def _examined_in_turn(rank: int) -> None:
    for kind, message in NOT_EXAMINED.items():
        assert message in _examined(rank, kind)


def test_what_cannot_be_examined_says_why() -> None:
    assert "start at least 2" in run_ranks(_examined, 1, "one rank")[0]
    run_ranks(_examined_in_turn, 2)


def test_a_virtual_interface_has_no_line_rate() -> None:
    assert interface_rate("lo") is None
    assert interface_rate("no such interface") is None
