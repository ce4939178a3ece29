"""The example of docs/pipelines.md runs as it stands."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from harness import run_ranks


def example(rank: int, source: str) -> str:
    import torch.distributed as dist

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(source.replace('dist.init_process_group("gloo")', ""), {"__name__": "example"})
    assert dist.is_initialized()
    return told.getvalue()


def test_the_example_trains() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    first, last = run_ranks(example, 2, source)
    assert first == ""
    losses = [float(found) for found in re.findall(r"loss ([\d.]+),", last)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "64 samples kept" in last
