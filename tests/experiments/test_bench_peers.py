"""``python -m experiments bench peers``: the same training by torchft and by thinwire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench import peers as module
from experiments.bench.peers import COMPRESSORS, PEER, peers


def test_it_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert peers() == 1
    assert "torchft is not installed: pip install torchft" in capsys.readouterr().out


@pytest.mark.network
@pytest.mark.timeout(200)
def test_thinwire_in_fp32_trains_as_torchft_does(tmp_path: Path) -> None:
    pytest.importorskip(PEER, reason="takes torchft: pip install torchft")
    path = tmp_path / "peers.json"
    assert peers(rates=("1gbit",), steps=30, every=10, seeds=1, json=path) == 0
    values = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    methods = (PEER, *COMPRESSORS)
    of_peer, exact, few = (values[f"1gbit/loss/{method}"] for method in methods)
    assert exact == pytest.approx(of_peer, rel=1e-5)
    assert few != exact
    sent_by_peer, sent_exact, sent_few = (values[f"1gbit/sent_bytes/{method}"] for method in methods)
    assert sent_exact == pytest.approx(sent_by_peer, rel=0.2)
    assert 8 * sent_few < sent_exact
