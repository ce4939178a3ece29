"""``thinwire bench cuda`` says what it lacks where there is no GPU; its parts run on any device."""

from __future__ import annotations

import pytest
import torch

from thinwire_tools.bench import cuda
from thinwire_tools.cli import main


def test_without_a_gpu_or_triton_it_says_so_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, words in ((False, "sees no CUDA device"), (True, "pip install triton")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        monkeypatch.setattr(cuda, "find_spec", lambda name: None)
        assert main(["bench", "cuda"]) == 1
        assert words in " ".join(capsys.readouterr().err.split())


def test_every_row_can_be_measured() -> None:
    rows = cuda.compressors(torch.device("cpu"), 40 * 1024, 1)
    assert len(rows) == 1 + 4 * len(cuda.SPECS)
    assert all(row.seconds > 0 for row in rows)
    assert all(row.sent_bytes > 0 for row in rows[1:])
    reduced = cuda.reductions(torch.device("cpu"), 40 * 1024, 1, 3)
    assert all(row.seconds > 0 and row.sent_bytes > 0 for row in reduced)


def test_an_error_of_a_rank_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args):
        raise OSError("no room")

    monkeypatch.setattr(cuda, "step_seconds", fails)
    with pytest.raises(OSError, match="no room"):
        cuda.reductions(torch.device("cpu"), 40 * 1024, 1, 2)
