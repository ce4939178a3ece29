"""For mkdocs: pages link to benchmarks/ and examples/ beside docs/, as forges want it; the site has copies of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_BESIDE = re.compile(r"\]\(\.\./((?:benchmarks|examples)/[^)\s]+)\)")
_README = re.compile(r"\]\(\.\./README\.md(?:#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The site's own copies."""
    for pattern in (
        "benchmarks/**/*.svg",
        "benchmarks/**/*.json",
        "examples/*.py",
        "examples/*.sh",
        "examples/*.ipynb",
    ):
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them, inside the site."""
    return _README.sub("](index.md)", _BESIDE.sub(r"](\1)", markdown))
