"""A training in a lab one of whose links is cut."""

from __future__ import annotations

import subprocess
import sys
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
import time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thinwire
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
network = thinwire.Network(timeout=timedelta(seconds=5))
wire = thinwire.compress(model, "ef(minmax(bits=2))", network=network, skip_if_slower=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(1000):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        time.sleep(0.05)
except thinwire.TransportError as error:
    assert len(wire.state_dict()) > 0
    print("named", error.rank, flush=True)
"""


def test_where_a_link_is_cut_each_rank_names_the_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with lab.Network(2) as network:
        ranks = [network.popen(rank, [sys.executable, str(script)], **pipes) for rank in range(2)]
        assert any("step 5" in line for line in ranks[0].stdout)
        network.set_link(1, up=False)
        assert [rank.communicate(timeout=90.0)[0].splitlines()[-1] for rank in ranks] == ["named 1", "named 0"]
