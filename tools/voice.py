"""Checks the beginnings and words of docstrings and comments, and American spelling: `python tools/voice.py [path]`."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

READ = ("src/", "experiments/framework/")
"""Folders whose docstrings and comments are checked. Spelling is checked everywhere."""

FRAGMENT = re.compile(
    r"(Of|By|In|On|At|From|With|Without|For|To|Over|Under|Among|Before|Between|After|Beside|That|Those|As|Where|Its|"
    r"Their|Them|What|How|Which|Why|When|Who|Whose|Whoever|The same|Same|So|Held|None|Not|Also|It|They)\b(?!-)"
)
"""Beginnings of docstrings that continue a sentence elsewhere, or are a clause without a noun."""

WORDS = re.compile(r"\b(anew|errs?|beside|none that|whoever|wherein|thereof|whilst)\b", re.IGNORECASE)
BRITISH = re.compile(
    r"(?<![a-z])(quant|normal|initial|optim|minim|maxim|synchron|serial|parallel|organ|real|recogn|special|general|"
    r"summar|random|regular|util|penal|local|token|vector|categor|character|emphas|stabil|standard)"
    r"is(e|ed|er|ers|es|ing|ation|ations|able)\b|(col|fav|hon|neighb|behavi|lab)our|(cent|met|fib)res?\b"
    r"|\banaly(se|sed|sing)\b|\bjudge(ment)|\b(licen|defen)ces?\b|\barte(fact)|\b(mode|labe|trave|signa)(lled|lling)\b",
    re.IGNORECASE,
)


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the text of each docstring, of attributes too, and comment, and whether it is a docstring."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def findings(path: str, *, reads_prose: bool) -> Iterator[str]:
    """Yield what is wrong in a file; with ``reads_prose``, in its docstrings and comments, too."""
    source = Path(path).read_text()
    for number, line in enumerate(source.splitlines(), 1):
        yield from (f"{path}:{number}: British spelling: {found[0]}" for found in BRITISH.finditer(line))
    for number, text, is_docstring in texts(source) if reads_prose else ():
        if is_docstring and FRAGMENT.match(text):
            yield f"{path}:{number}: a docstring begins as a fragment: {text.splitlines()[0]}"
        yield from (f"{path}:{number}: {found[0]!r}" for found in WORDS.finditer(text))


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True)
    found = []
    for path in listed.stdout.splitlines():
        found += findings(path, reads_prose=path.endswith(".py") and path.startswith(tuple(sys.argv[1:]) or READ))
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
