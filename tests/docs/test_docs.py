"""README.md and docs/: links lead somewhere, commands are known and run by a test, examples run as they stand."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import tyro
from torch import nn

import thinwire
from experiments.__main__ import EXPERIMENTS
from harness import run_ranks
from thinwire.compressors import registered
from thinwire_tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="not in a source tree")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def text_of(page: Path) -> str:
    return page.read_text()


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
            yield Block(page.relative_to(ROOT).as_posix(), language, text)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as forges and mkdocs make them."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose, re.MULTILINE):
        kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
        found.add(kept.strip().replace(" ", "-"))
    return found


def test_tests_that_pages_name_are_there() -> None:
    there = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for page in PAGES:
        if page.name != "process-group.md":  # it names PyTorch's
            assert not set(re.findall(r"`(test_\w+)`", text_of(page))) - there, page.name


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.name} links to {target}, which has {anchors(there)}"


def test_code_fits_a_page_without_scrolling() -> None:
    """Of a window of 1280 pixels the text takes the width of about so many characters."""
    assert [(block.page, line) for block in blocks() for line in block.text.splitlines() if len(line) > 92] == []


def test_every_page_is_in_the_navigation_and_every_public_name_in_the_reference() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in PAGES[2:] if not re.search(rf"\b{re.escape(page.name)}\b", navigation)]
    assert not missing
    documented = set(
        re.findall(r"^::: thinwire(?:_tools)?\.([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    )
    # `compress` has the name of the module that it stands in, which mkdocstrings would find under the short name.
    assert set(thinwire.__all__) - {name.split(".")[0] for name in documented} == {"compress"}
    assert "api.compress" in documented


def test_names_and_specs_that_pages_mention_exist() -> None:
    known = set(registered())
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = text_of(page)
        for name in re.findall(r"(?<![\w./-])thinwire\.([a-zA-Z_]\w*)(?!\.\w*\.org)", text):
            if name not in ("compressors", "org", "adapt"):  # the last is a logger
                assert hasattr(thinwire, name) or importlib.util.find_spec(f"thinwire.{name}"), f"{page.name}: {name}"
        for spec in re.findall(r'"((?:\w+)\([^"]*\)(?: \| \w+\([^"]*\))?)"', text):
            if spec.split("(")[0] in known and "..." not in spec:
                thinwire.parse(spec.replace("\\|", "|"))


# Commands that are none of thinwire's own, and what runs them.
ELSEWHERE = {
    "python -m experiments bench compressors": "tests/experiments/test_bench_commands.py",
    "torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint elastic.pt": (
        "tests/docs/test_examples.py"
    ),
    "python examples/ray_train.py": "tests/docs/test_examples.py",
    "python tools/slow_tests.py build/tests.log": "tests/test_structure.py",
    # A placeholder, in whose place the release workflow puts the address.
    "git clone https://example.org/thinwire && cd thinwire": ".github/workflows/release.yml",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "Makefile",
    "pip install .": ".ci/run",  # make wheel-check builds what pip would, and installs it
}
# Which test runs a command of thinwire's from its command line.
RUN_BY = {
    "--version": "test_commands.py",
    "demo": "test_demo.py",
    "doctor": "test_doctor.py",
    "run": "test_run.py",
    "lab": "test_lab.py",
    "compare": "test_compare.py",
    "compare every": "test_compare.py",
    "bench kernels": "test_commands.py",
    "bench allreduce": "test_commands.py",
    "bench step": "test_commands.py",
    "bench cuda": "test_cuda_bench.py",
}


def commands() -> Iterator[tuple[str, str]]:
    """Every line of a shell block, with its page."""
    for block in blocks():
        if block.language in ("", "bash", "sh"):
            for line in block.text.splitlines():
                command = re.sub(r"\s+#.*$", "", line).strip()
                if command:
                    yield block.page, command


def command_of(line: str) -> tuple[str, list[str]]:
    words = shlex.split(line)[1:]
    for count in (2, 1):
        if (name := " ".join(words[:count])) in RUN_BY:
            return name, words[count:]
    raise AssertionError(f"{line!r} is no command that a test is known to run: add it to RUN_BY")


def test_commands_are_taken_as_they_are_written_and_run_by_a_test() -> None:
    for page, line in dict.fromkeys(commands()):
        try:
            check_command(line)
        except (AssertionError, SystemExit) as error:
            pytest.fail(f"{page}: {line!r}: {error}")


def check_command(line: str) -> None:
    if line.startswith("python -m experiments ") and line not in ELSEWHERE:
        assert line.split()[3] in EXPERIMENTS.commands
        return
    line = re.sub(r"^torchrun .*-m thinwire ", "thinwire ", line)
    if line.startswith("make "):
        assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if not line.startswith("thinwire "):
        assert line in ELSEWHERE, "nobody runs it"
        assert (ROOT / ELSEWHERE[line]).exists()
        return
    name, args = command_of(line)
    source = next((ROOT / "tests").rglob(RUN_BY[name])).read_text()
    assert all(re.search(rf"\b{re.escape(word.lstrip('-'))}\b", source) for word in name.split()), RUN_BY[name]
    if name == "--version":
        assert cli.main(["--version"]) == 0
        return
    command: Any = cli.THINWIRE.commands[name].load(script="--" in args)
    if "--" in args:
        at = args.index("--")
        assert args[at + 1 :]
        command, args = functools.partial(command, args[at + 1 :]), args[:at]
    assert parsed(command, args) is not None


def parsed(command: Any, args: list[str]) -> Any:
    """What a command would be called with; raises ``SystemExit`` where it does not take the arguments."""
    inner = command.func if isinstance(command, functools.partial) else command
    called: list[dict[str, Any]] = []

    @functools.wraps(inner)
    def instead(*_: Any, **named: Any) -> None:
        called.append(named)

    stub = functools.partial(instead, *command.args) if isinstance(command, functools.partial) else instead
    tyro.cli(stub, args=args)
    return called[0]


class Net(nn.Module):
    """Names that the pages' rules speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.embedding = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.bn = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(self.embed(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.bn(x)


def execute(rank: int, sources: list[str], folder: str) -> int:
    """Run blocks statement by statement; what was compressed makes a step, and gives way to a new model before the next
    statement that compresses."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.chdir(folder)
    done = 0
    for source in sources:
        told = ast.unparse(ast.parse(source))  # without comments
        sharded, wrapped = "fully_shard(" in told, "DistributedDataParallel(model" in told
        names: dict[str, Any] = {"thinwire": thinwire, "dist": dist, "fully_shard": fully_shard}
        names |= {"DistributedDataParallel": DistributedDataParallel, "init_device_mesh": init_device_mesh}
        names |= {"block": nn.Linear(4, 4), "rank": rank, "num_stages": 2, "device": torch.device("cpu")}

        def renew(names: dict[str, Any] = names, plain: bool = sharded or wrapped) -> None:
            torch.manual_seed(0)
            names["model"] = Net() if plain else DistributedDataParallel(Net())
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)

        renew()
        used = False
        for node in ast.parse(source).body:
            text = ast.unparse(node)
            if "thinwire.compress(stage" in text:
                from torch.distributed.pipelining import PipelineStage

                names["stage"] = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
            if "thinwire.compress(model" in text and used:
                renew()
                if sharded:
                    fully_shard(names["model"])
            if text.startswith("dist.init_process_group"):
                continue
            exec(compile(ast.Module([node], []), "page", "exec"), names)
            done += 1
            if "thinwire.compress(model" in text:
                used = True
                assert isinstance(names["model"], FSDPModule if sharded else DistributedDataParallel)
                names["model"](torch.randn(4, 32)).square().mean().backward()
    return done


SMALLER = {'init_device_mesh("cpu", (2, 4)': 'init_device_mesh("cpu", (1, 2)'}
"""Of a page's example, so that two ranks do: what stands in place of what."""


@pytest.mark.timeout(300)
def test_examples_run_as_they_stand(tmp_path: Path) -> None:
    sources = []
    for block in blocks():
        if block.language != "python" or block.page == "docs/pipelines.md":  # a test of its own runs that
            continue
        source = block.text
        for old, new in SMALLER.items():
            source = source.replace(old, new)
        sources.append(source)
    assert len(sources) >= 9
    with tempfile.TemporaryDirectory() as folder:
        counts = run_ranks(execute, 2, sources, folder, timeout_s=250)
    assert counts[0] == counts[1] > 25


def pipeline(rank: int, source: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(source.replace('dist.init_process_group("gloo")', ""), {"__name__": "example"})
    return told.getvalue()


def test_the_example_of_a_pipeline_trains() -> None:
    (source,) = (b.text for b in blocks() if b.language == "python" and b.page == "docs/pipelines.md")
    first, last = run_ranks(pipeline, 2, source)
    assert first == ""
    losses = [float(found) for found in re.findall(r"loss ([\d.]+),", last)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "64 samples kept" in last


def test_diffs_are_of_lines_that_examples_have() -> None:
    (diff,) = (block.text for block in blocks() if block.language == "diff")
    script = (ROOT / "examples" / "ddp.py").read_text()
    for line in diff.splitlines():
        if line.startswith("+ wire"):
            assert line[2:].split("(")[0] in script
    assert {block.language for block in blocks()} <= {"", "bash", "sh", "python", "diff", "text"}
