"""What the comparisons train: the text, the model, the paired training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire_tools.compare import data

pytestmark = pytest.mark.usefixtures("one_thread")


def _library(root: Path, modules: dict[str, str]) -> Path:
    for name, source in modules.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


MODULES = {f"module{i}.py": f"# module {i}\n" + f"value_{i} = {i}\n" * 2000 for i in range(60)}
MODULES |= {f"package/part{i}.py": f"# part {i}\n" * 2000 for i in range(4)}
"""Sixty modules and a package, more than the megabyte that a corpus takes."""
LEFT_OUT = {
    "test/test_module.py": "SENTINEL = 1\n",
    "package/tests/test_part.py": "SENTINEL = 2\n",
    "site-packages/foreign/core.py": "SENTINEL = 3\n",
    "zz_copy_of_module.py": MODULES["module7.py"],
    "empty.py": "",
}


def test_the_text_is_of_modules_alone_each_on_one_side_whatever_the_order_of_their_files(tmp_path: Path) -> None:
    text = data.standard_library(_library(tmp_path / "a", MODULES))
    other = data.standard_library(_library(tmp_path / "b", dict(reversed(MODULES.items())) | LEFT_OUT))
    assert text.digest == other.digest
    assert torch.equal(text.train, other.train)
    assert torch.equal(text.held_out, other.held_out)
    train, held_out = (bytes(part.tolist()) for part in (text.train, text.held_out))
    for source in MODULES.values():
        assert (source.encode() in train) != (source.encode() in held_out)
    assert len({f"# part {i}\n".encode() in train for i in range(4)}) == 1


def test_too_little_source_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"too little Python source.*use a Python that ships"):
        data.standard_library(_library(tmp_path, {"one.py": "x = 1\n"}))


def test_batches_stay_inside_the_text_and_depend_on_the_arguments_alone() -> None:
    for num_tokens, context, steps, num_ranks, batch in ((40, 32, 5, 4, 4), (10_000, 1, 1, 1, 1)):
        sizes = {"steps": steps, "num_ranks": num_ranks, "batch": batch, "context": context}
        offsets = data.draw_offsets(num_tokens, **sizes, seed=7)
        torch.rand(3)
        assert torch.equal(offsets, data.draw_offsets(num_tokens, **sizes, seed=7))
        inputs, targets = data.windows(torch.arange(num_tokens), offsets.flatten(), context)
        assert inputs.shape == targets.shape == (steps * num_ranks * batch, context)
        assert torch.equal(targets, inputs + 1)
