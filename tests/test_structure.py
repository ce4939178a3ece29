"""Rules of the house that no tool checks: floors below ranks, private names, long files, a lean import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rules_of_the_house(path: Path) -> None:
    place = path.relative_to(ROOT).parts[0]
    source = path.read_text()
    if place in ("kernels", "compressors", "store", "plan"):
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]
    if place != "compat.py":
        private = [
            f"{ast.unparse(node)}"
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node.value).split(".")[0] in ("torch", "dist")
        ]
        assert not private, "private PyTorch names belong into compat.py"
    assert len(source.splitlines()) <= 400


def test_import_is_lean() -> None:
    """`import thinwire` brings in nothing that only commands or accelerators need."""
    heavy = ["triton", "matplotlib", "rich", "tyro", "scipy", "sklearn", "torch._dynamo", "torch._inductor"]
    code = (
        f"import sys, torch\nbefore = set(sys.modules)\nimport thinwire\n"
        f"print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    )
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_public_name_is_documented() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name).__doc__, name
