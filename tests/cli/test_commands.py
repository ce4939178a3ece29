"""The command line: help, errors, benchmarks at small sizes, and pages whose figures are those of the JSON files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from experiments.__main__ import EXPERIMENTS, main as experiments_main
from experiments.bench import growth
from experiments.framework.timing import Times
from thinwire.plan.forecast import Bucket, Curve, Links, Pace
from thinwire_tools import cli, lab, ranks

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["demo", "doctor", "run", "lab", "aggregator", "compare", "compare every"]
COMMANDS += ["bench kernels", "bench allreduce", "bench step", "bench cuda"]


def test_every_command_has_help_with_examples(capsys) -> None:
    assert cli.main(["--help"]) == 0
    whole = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in whole
        try:
            code = cli.main([*command.split(), "--help"])
        except SystemExit as end:  # how tyro ends
            code = end.code
        assert code == 0
        shown = capsys.readouterr().out
        for words in ("thinwire " + command, "Examples", *(["--json"] if command != "aggregator" else [])):
            assert words in shown, command
        for words in ("{None}", "(default: None)", "(default: )", "[STR", "``"):
            assert words not in shown, command
        # Words are not cut in two, and examples are lines to copy; tyro writes the line of usage as it likes.
        assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("usage: ")), command


@pytest.mark.parametrize("command", ["", "compare", "doctor"])
def test_help_that_is_cut_by_head_ends_without_a_traceback(command: str) -> None:
    line = f"{sys.executable} -u -m thinwire {command} --help | head -c 1"
    shown = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert len(shown.stdout) == 1
    assert not shown.stderr


def test_compare_has_two_forms_and_an_option_of_the_other_form_says_so(capsys) -> None:
    for argv, code, words in (
        (["--plot", "curves.svg"], 2, "--plot is an option for your own script only"),
        (["4bit", "train.py"], os.EX_USAGE, 'a script comes after two dashes: thinwire compare "4bit" -- train.py'),
        (["--smoke", "--", "train.py"], 2, "--smoke is an option for a small GPT of its own only"),
    ):
        assert cli.main(["compare", *argv]) == code
        assert words in capsys.readouterr().err


def test_help_and_version_do_not_import_torch() -> None:
    calls = [["--help"], ["--version"], [], ["bench"], ["plan"], ["plan", "--help"], ["nosuch"]]
    calls += [[*command.split(), "--help"] for command in COMMANDS]
    code = f"""
import sys
from thinwire_tools import cli
for argv in {calls}:
    try:
        cli.main(argv)
    except SystemExit as end:  # how tyro ends
        assert end.code == 0, argv
    assert "torch" not in sys.modules, argv
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_group_by_itself_lists_its_own_commands_and_help_fits_80_columns(capsys) -> None:
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(f"bench {name}" in shown for name in ("kernels", "allreduce", "step", "cuda"))
    assert "demo" not in shown
    assert cli.main(["bench", "nosuch"]) == 2
    assert "no command 'bench nosuch'; it has bench kernels" in " ".join(capsys.readouterr().err.split())
    for program in (cli.THINWIRE, EXPERIMENTS):
        assert program.run([]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {thinwire.__version__}\n"


def figures(path: Path) -> dict[str, float]:
    record = json.loads(path.read_text())
    assert {"command", "versions", "machine", "results"} <= set(record)
    return {row["name"]: row["value"] for row in record["results"]}


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_bench_allreduce(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    arguments = ["bench", "allreduce", "--rate", "200mbit", "--size-mb", "2", "--repeats", "2", "--json", str(path)]
    assert cli.main(arguments) == 0
    found = figures(path)
    assert found["replicas_identical/sra/group"] == 1.0
    assert found["speedup_over_gloo/sra/group"] == pytest.approx(found["seconds/gloo"] / found["seconds/sra/group"])
    sent = found["formula_bytes/sra/group"]
    assert sent == pytest.approx(2 * found["payload_bytes/gloo"] * 4.5 / 32, rel=0.01)
    assert sent <= found["interface_bytes/sra/group"] < 1.15 * sent + 20_000
    assert 0.05 < found["relative_error/sra/group"] < 0.3
    assert found["seconds/bare/sra/group"] > 8 * sent / 2 / 200e6 * 0.8


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_bench_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"
    cell = ["--ranks", "4", "--sizes-mb", "1", "--rates", "1gbit", "--rtts", "0ms", "--repeats", "1"]
    assert experiments_main(["bench", "algorithms", *cell, "--json", str(path)]) == 0
    found = figures(path)
    flat, nested, one = (f"4 ranks/{n} a node/{r}/0ms/1 MB/" for n, r in ((1, "1gbit"), (2, "1gbit"), (4, "none")))
    assert found[f"{flat}variance/ring/group"] > found[f"{flat}variance/sra/group"]
    assert found[f"{flat}formula_bytes/allgather/group"] > found[f"{flat}formula_bytes/ring/group"]
    across = "crossing_bytes/hierarchical(inside=dense, across=leaders)/auto"
    assert found[nested + across] == pytest.approx(found[f"{nested}crossing_bytes/sra/auto"] / 2, rel=0.1)
    assert found[f"{one}crossing_bytes/sra/shared"] == 0
    timed = [name for name in found if "/seconds/" in name and "/bare/" not in name]
    assert sum(not name.endswith(("/gloo", "/fp32")) for name in timed) == 5 + 8 + 6
    assert all(value == 1.0 for name, value in found.items() if "replicas_identical" in name)


@pytest.mark.alone  # It compares replayed steps with and without communication.
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_bench_growth(tmp_path: Path) -> None:
    path, picture = tmp_path / "growth.json", tmp_path / "growth.svg"
    cell = ["--ranks", "2", "--rtts-ms", "0", "--models", "1M", "--runs", "1", "--rounds", "1", "--plot", str(picture)]
    assert experiments_main(["bench", "growth", *cell, "--json", str(path)]) == 0
    found = figures(path)
    assert found["step_s/0/2/thinwire"] > found["step_s/0/2/nothing"] > 0
    assert found["forecast_s/0/1024/two levels"] >= found["forecast_s/0/1024/thinwire"] > 0
    assert 0.05 < found["error/2"] < 0.3
    assert next(row for row in json.loads(path.read_text())["results"] if row["name"] == "named_s/2")["named"] == 1
    assert "<svg" in picture.read_text()


def test_growth_on_paper_adds_the_processor_time_of_as_many_messages_as_there_are_other_ranks() -> None:
    cpu_s = {2: 0.0, 4: 0.03, 8: 0.07}
    found = {
        n: Times({}, {}, cpu_s={"fp32": (0.02,), "thinwire": (0.01 + own,), "nothing": (0.01,)})
        for n, own in cpu_s.items()
    }
    taken = growth.processor(found, 16)
    assert taken == pytest.approx({"fp32": 0.01, "thinwire": 0.15})
    assert growth.processor(found, 4) == pytest.approx({"fp32": 0.01, "thinwire": 0.03})
    found[16] = Times({}, {}, cpu_s={"thinwire": (0.2,), "nothing": (0.0,)})
    assert growth.processor(found, 16) == pytest.approx({"fp32": 0.01, "thinwire": 0.2}), "fp32 was not timed there"
    pace = Pace((Bucket(0.1, (("a", (1000,)),)), Bucket(0.2, (("b", (3000,)),))), 0.25, shared=1.0)
    free = Curve(((0.0, 0.0), (1e6, 1e-9)))
    steps = growth.forecast(pace, Links(free, free, 2), 16, taken, 0.0)
    assert steps == pytest.approx({"fp32": 0.2525, "thinwire": 0.4, "two levels": 0.4}, rel=1e-3)
    far = growth.forecast(pace, Links(free, free, 2), 16, taken, 0.1)
    assert far == pytest.approx({"fp32": 3.25, "thinwire": 0.49, "two levels": 0.58}, rel=1e-2)


def test_bench_step_over_loopback(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    options = ["--rate", "none", "--skip-if-slower", "--target", "0", "--rounds", "1", "--steps", "1", "--batches", "1"]
    assert cli.main(["bench", "step", *options, "--json", str(path)]) == 0
    found = figures(path)
    assert found["share_of_ceiling/thinwire"] > 0.2


def test_the_figures_of_pages_are_those_of_the_json_files() -> None:
    command = [sys.executable, "-m", "experiments.framework.pages", "--check"]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0


WRONG = [
    ("compare 'minmax(bits=99)'", "bits"),
    ("compare 4bit --within little", "write 1% or 0.01"),
    ("compare 4bit --within 100%", "margin"),
    ("compare 4bit --ranks 1", "at least 2"),
    ("compare 4bit --seeds 0", "at least one (--seeds 1)"),
    ("compare 4bit --steps 1", "at least 2"),
    ("compare 4bit --rate fast", "rate"),
    ("compare 4bit --control 4bit", "another control"),
    ("compare 'topk(density=0.1) with '", "names no policy"),
    ("compare 'topk with lgreco(evry=3)'", "lgreco has no parameter 'evry'"),
    ("compare --", "needs a script"),
    ("compare --ranks 1 -- a.py", "2 ranks"),
    ("compare nosuch -- a.py", "no compressor is called 'nosuch'"),
    ("compare --pattern ( -- a.py", "--pattern"),
    ("demo --smoke --rate fast", "'fast' is not a rate"),
    ("demo --smoke --ranks 1", "at least 2 ranks"),
    ("demo --smoke --seed -1", "--seed -1"),
    ("aggregator --slots 0", "slots must be between 1 and"),
    ("doctor --ranks 1", "at least 2"),
    ("doctor --steps 3", "at least 6"),
    ("doctor --compressors minmaxx", "minmax"),
    ("doctor --price-per-hour 3", "--tokens-per-step"),
    ("doctor --samples-per-step 3 --tokens-per-step 3", "give one of them"),
    ("doctor --rate fast", "is not a rate"),
    ("doctor --ranks-per-node 2", "is for an emulated network"),
    ("bench cuda --size-mb 0", "at least 1"),
    ("bench kernels --size-mb 0", "--size-mb"),
    ("bench step --rate -5mbit", "'-5mbit' is not a rate"),
    ("bench step --rate none --batches 0", "must be above 0"),
    ("bench allreduce --ranks -3", "num_ranks is -3"),
    ("bench allreduce --size-mb nan", "must be above 0"),
    ("bench allreduce --algorithm mesh", "'mesh' is not a collective algorithm"),
]
NOT_THERE = [
    *("doctor -- nosuch.py", "doctor --rate 1gbit -- python nosuch.py --epochs 1", "doctor -- -m nosuch.py"),
    *("run -- nosuch.py", "run -- -m nosuch.py.train", "lab -- python nosuch.py", "compare 4bit -- nosuch.py"),
]


def test_what_is_wrong_is_said_before_anything_runs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "RankProcesses", None)
    monkeypatch.chdir(tmp_path)
    for command, words in WRONG:
        if lab.unavailable() is not None and ("--rate" in command or "allreduce" in command):
            continue
        assert cli.main(shlex.split(command)) == os.EX_USAGE, command
        assert words in " ".join(capfd.readouterr().err.split()), command
    for command in NOT_THERE:
        assert cli.main(command.split()) == os.EX_USAGE, command
        told = " ".join(capfd.readouterr().err.split())
        assert told.startswith(f"thinwire {command.split()[0]}: there is no ")
        assert told.count("nosuch") == 1
    assert list(tmp_path.iterdir()) == []
