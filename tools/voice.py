"""Checks how docstrings begin, words of comments and docstrings, and American spelling: `python tools/voice.py`."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

DONE = ("src/thinwire/kernels",)
"""Folders and files whose docstrings and comments are checked; spelling is checked everywhere."""

FRAGMENT = re.compile(
    r"(Of|By|In|On|At|From|With|Without|For|To|Over|Under|Among|Before|Between|After|Beside|That|Those|As|Where|Its|"
    r"Their|Them|What|How|Which|Why|When|Who|Whose|Whoever|The same|Same|So|Held|None|Not|Also)\b(?!-)"
)
"""A docstring that begins so continues a sentence that stands elsewhere, or is a clause without its noun."""

WORDS = re.compile(r"\b(anew|errs?|beside|none that|whoever|wherein|thereof|whilst)\b", re.IGNORECASE)
STEMS = (
    r"(quant|normal|initial|optim|minim|maxim|synchron|serial|parallel|organ|real|recogn|special|general|summar|"
    r"random|regular|util|penal|final|factor|local|token|vector|categor|character|emphas|stabil|standard)"
)
BRITISH = re.compile(
    rf"(?<![a-z]){STEMS}is(e|ed|er|ers|es|ing|ation|ations|able)\b|\b(un)?(colour|favour|honour|neighbour|behaviour|"
    r"labour|centre|metre|fibre|analyse|judgement|licence|artefact|defence)(s|d|ed|ing|ful|able|hood)?\b"
    r"|\b(modell|labell|travell|signall)(ed|ing)\b",
    re.IGNORECASE,
)


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the text of each docstring, of attributes too, and comment, and whether it is a docstring."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def findings(path: Path, checks_voice: bool) -> Iterator[str]:
    source = path.read_text()
    for number, line in enumerate(source.splitlines(), 1):
        yield from (f"{path}:{number}: British: {found[0]}" for found in BRITISH.finditer(line))
    for number, text, is_docstring in texts(source) if checks_voice else ():
        if is_docstring and (found := FRAGMENT.match(text)):
            yield f"{path}:{number}: a docstring begins with {found[0]!r}: {text.splitlines()[0]}"
        yield from (f"{path}:{number}: {found[0]!r} in {text!r}" for found in WORDS.finditer(text))


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True).stdout
    checked = sys.argv[1:] or DONE
    found = [
        finding
        for name in listed.splitlines()
        for finding in findings(Path(name), name.endswith(".py") and name.startswith(tuple(checked)))
    ]
    print("\n".join(found) or "docstrings, comments and spelling are those of the house")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
