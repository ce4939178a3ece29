"""Trainings in a lab one of whose links is cut: an error with the rank, or the same bits once it is back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire_tools import lab

MISSING = lab.unavailable()
pytestmark = [
    pytest.mark.alone,
    pytest.mark.network,
    pytest.mark.timeout(240),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]

TRAINING = """
import hashlib, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thinwire
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
network = thinwire.Network(timeout=timedelta(seconds=float(sys.argv[1])))
wire = thinwire.compress(model, "ef(minmax(bits=2))", network=network, skip_if_slower=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(int(sys.argv[2])):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        time.sleep(0.05)
    weights = model.module.weight.detach().numpy().tobytes()
    print("weights", hashlib.sha256(weights).hexdigest(), wire.stats.compressed_steps, flush=True)
except thinwire.TransportError as error:
    assert len(wire.state_dict()) > 0
    print("named", error.rank, flush=True)
"""


def ends(script: Path, timeout_s: int, steps: int, changes: list[tuple[bool, float]]) -> list[str]:
    """The last line of each rank; after a few steps the link of rank 1 is up, or not, for these times."""
    script.write_text(TRAINING)
    argv = [sys.executable, str(script), str(timeout_s), str(steps)]
    with lab.Network(2) as network:
        ranks = [network.popen(rank, argv, stdout=subprocess.PIPE, text=True) for rank in range(2)]
        assert any("step 5" in line for line in ranks[0].stdout)
        for up, seconds in changes:
            network.set_link(1, up=up)
            time.sleep(seconds)
        return [rank.communicate(timeout=90.0)[0].splitlines()[-1] for rank in ranks]


def test_where_a_link_is_cut_each_rank_names_the_other(tmp_path: Path) -> None:
    assert ends(tmp_path / "train.py", 5, 1000, [(False, 0.0)]) == ["named 1", "named 0"]


def test_a_link_that_comes_back_in_time_changes_no_bit(tmp_path: Path) -> None:
    first, second = ends(tmp_path / "train.py", 60, 16, [])
    assert first == second
    assert first.endswith(" 16"), "every step was compressed"
    assert ends(tmp_path / "train.py", 60, 16, [(False, 1.0), (True, 0.0)]) == [first, first]
