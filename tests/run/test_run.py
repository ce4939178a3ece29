"""``thinwire run``: a script that knows nothing of thinwire trains with compression, and goes on from its state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from doctor_training import train
from harness import run_ranks
from thinwire_tools import cli
from thinwire_tools.run.attachment import Attachment, UsageError
from thinwire_tools.run.command import run

SCRIPT = str(Path(__file__).parents[1] / "support" / "doctor_training.py")
ALWAYS = {"skip_if_slower": False}


def attached_on(rank: int, state: str, steps: int) -> tuple[int, int, bool]:
    attachment = Attachment("ef(minmax(bits=2))", ALWAYS, Path(state), 5)
    with attachment:
        weights = train(steps, 0.0)
    plain = train(steps, 0.0)
    assert attachment.wire is not None
    differs = any(not torch.equal(weights[name], plain[name]) for name in weights)
    return attachment.wire.step, attachment.wire.stats.compressed_steps, differs


def test_the_model_that_trains_is_compressed_and_its_state_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out" / "thinwire.pt"
    assert run_ranks(attached_on, 2, str(path), 12) == [(11, 12, True)] * 2
    # The last one of every five steps.
    assert int(torch.load(path, weights_only=True)["step"]) == 9
    assert run_ranks(attached_on, 2, str(path), 3) == [(12, 3, True)] * 2
    assert not list(path.parent.glob("*.part"))


def resumed_with_another_compressor_on(rank: int, state: str) -> None:
    for spec in ("ef(minmax(bits=2))", "minmax(bits=4)"):
        with warnings.catch_warnings(record=True) as seen, Attachment(spec, ALWAYS, Path(state), 1):
            warnings.simplefilter("always")
            train(2, 0.0)
        assert len(seen) == (not spec.startswith("ef("))
    assert "ef(minmax(bits=2, bucket=128)), not minmax(bits=4, bucket=128)" in str(seen[0].message)


def test_a_state_of_another_compressor_says_so(tmp_path: Path) -> None:
    run_ranks(resumed_with_another_compressor_on, 2, str(tmp_path / "thinwire.pt"))


def sharded_on(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(net)
    attachment = Attachment("4bit", ALWAYS, None, 1)
    with attachment:
        net(torch.ones(2, 64)).sum().backward()
    wire = attachment.wire
    assert isinstance(wire, thinwire.Wire)
    assert str(wire.plan["gradients/0.weight"]) == "minmax(bits=4, bucket=128)"
    assert wire.stats.payload_sent_bytes > 0


def test_a_sharded_model_is_found_too() -> None:
    run_ranks(sharded_on, 2)


def misused_on(rank: int, folder: str) -> None:
    here = Path(folder) / "thinwire.pt"
    for spec, state, words in (
        ("nosuch", None, "no compressor is called 'nosuch'"),
        ("4bit", here if rank else Path(folder) / "none.pt", "is there on 1 of 2 ranks: put it where all can read it"),
    ):
        with pytest.raises(UsageError, match=words), Attachment(spec, ALWAYS, state, 1):
            train(1, 0.0)


def test_what_does_not_fit_is_reported_on_every_rank_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "thinwire.pt").touch()
    run_ranks(misused_on, 2, str(tmp_path))


def test_scripts_and_options_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        ([], "thinwire run -- train.py"),
        (["--save-every", "0", "--", SCRIPT], "--save-every 0: at least 1"),
        (["--compress", "topk(1%)", "--", SCRIPT], "Did you mean 'topk(density=0.01)'?"),
        (["--start", "-1", "--", SCRIPT], "thinwire run: start must be at least 0"),
    ):
        assert cli.main(["run", *argv]) == 64
        assert words in capsys.readouterr().err


def test_of_several_ranks_one_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["run", "--compress", "topk(1%)", "--", SCRIPT]) == 64
    assert cli.main(["doctor", "--steps", "3"]) == 64
    assert capsys.readouterr().err == ""


def test_a_script_that_trains_nothing_distributed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import sys\nprint(sys.argv)\nsys.exit(3)\n")
    with pytest.raises(SystemExit) as end:
        run((str(script), "--lr", "1"))
    assert end.value.code == 3
    told = capsys.readouterr()
    assert told.out == f"['{script}', '--lr', '1']\n"
    assert "in the script's own process, so nothing was compressed" in told.err
    script.write_text("raise ValueError\n")
    with pytest.raises(ValueError) as failed:
        run((str(script),))
    assert failed.value.__notes__[0].startswith("thinwire run starts no ranks: torchrun ")


def test_ctrl_c_is_one_line_and_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "stopped.py"
    script.write_text("raise KeyboardInterrupt\n")
    assert cli.main(["run", "--", str(script)]) == 130
    assert capsys.readouterr().err.strip() == "thinwire run: interrupted"


@pytest.mark.timeout(300)
def test_under_torchrun_as_a_user_starts_it(tmp_path: Path) -> None:
    figures = tmp_path / "stats.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "thinwire", "run", "--always", "--json", str(figures), "--", SCRIPT, "4", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "THINWIRE_COMPRESS": "8bit"}
    argv = [*command, str(tmp_path / "weights.pt")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"thinwire run: 4 steps, .* MB sent instead of", done.stderr)) == 1
    record = json.loads(figures.read_text())
    assert "minmax(bits=8" in record["about"]["plan"]
    assert {row["name"]: row["value"] for row in record["results"]}["compressed_steps"] == 4
    assert (tmp_path / "weights.pt").exists()
