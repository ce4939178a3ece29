"""Rules of the house that no tool checks: floors below ranks, private names, a lean import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import slow_tests
import voice

import thinwire
import thinwire_tools
from thinwire.compat import OPTIMIZERS_IMPORT

ROOT = Path(thinwire.__file__).parent
TOOLS = Path(thinwire_tools.__file__).parent
FILES = sorted([*ROOT.rglob("*.py"), *TOOLS.rglob("*.py")])
TESTS = Path(__file__).parent


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private(source: str) -> Iterator[str]:
    """Private names of PyTorch that a file uses."""
    for node in ast.walk(ast.parse(source)):
        hidden = isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)
        if hidden and ast.unparse(node).split(".")[0] in ("torch", "dist"):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def offenders(rule: Callable[[str], Iterable[str]], files: Iterable[Path] = FILES) -> list[str]:
    """What breaks a rule, in which file."""
    return [f"{path.relative_to(ROOT.parent)}: {found}" for path in files for found in rule(path.read_text())]


def test_private_names_of_pytorch_are_in_compat_only() -> None:
    assert offenders(private, [path for path in FILES if path != ROOT / "compat.py"]) == []
    assert sorted(private("torch._C.x\ndist.nn._y\ntorch.__version__")) == ["line 1: torch._C", "line 2: dist.nn._y"]


def test_floors_below_ranks_do_not_know_ranks() -> None:
    lower = ("kernels", "compressors", "store", "plan", "policies")
    files = [path for path in FILES if path.relative_to(ROOT.parent).parts[1] in lower]
    assert offenders(lambda source: (n for n in imports(source) if n.startswith("torch.distributed")), files) == []


# fmt: off
FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted",
    "empty_strided", "eye", "from_file", "frombuffer", "full", "hamming_window", "hann_window", "kaiser_window",
    "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor",
    "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "fft.fftfreq",
    "fft.rfftfreq", "Tensor", "FloatTensor",
}
# fmt: on
"""What of `torch` makes a tensor out of none. What is made like another tensor has its dtype and its device."""

ON_THE_HOST = {"frombuffer", "from_file"}
"""Those that take no device, or none but the CPU."""


def unnamed(source: str) -> Iterator[str]:
    """What is left to PyTorch's defaults, which belong to the user: dtypes and devices that a file does not name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        _, of_torch, name = ast.unparse(node.func).rpartition("torch.")
        if of_torch and name in FACTORIES:
            wanted = {"dtype"} if name in ON_THE_HOST else {"dtype", "device"}
            missing = wanted - {keyword.arg for keyword in node.keywords}
            yield from (f"line {node.lineno}: torch.{name} without {argument}=" for argument in sorted(missing))
        if of_torch and name == "finfo" and not (node.args or node.keywords):
            yield f"line {node.lineno}: torch.finfo()"


def test_nothing_is_left_to_the_default_dtype_or_device() -> None:
    assert offenders(unnamed) == []


def test_a_dtype_or_a_device_that_is_not_named_is_found() -> None:
    source = "torch.empty(3, dtype=a)\ntorch.tensor(1.0)\nx.new_zeros(3)\ntorch.frombuffer(b, dtype=a)\nempty(3)"
    assert [line.removeprefix("line ") for line in unnamed(source)] == [
        "1: torch.empty without device=",
        "2: torch.tensor without device=",
        "2: torch.tensor without dtype=",
    ]


def test_the_core_gets_no_address_that_was_not_checked() -> None:
    """Those that GPU kernels take say how messages are aligned, and nothing else."""
    taking = [path.name for path in FILES if path.parent.name == "kernels" and "data_ptr(" in path.read_text()]
    assert taking == ["gpu.py", "native.py"]


PRIVATE_IN_TESTS = {
    "_exit": "of os",
    "_apply_optimizer_in_backward": "of PyTorch, as its users call it",
    "_asdict": "of named tuples",
    "_replace": "of named tuples",
    "_all_gather_comm": "of PyTorch, which keeps FSDP2's collectives there",
    "_dynamo": "of PyTorch, as its users set it",
    "_coalescing_manager": "of PyTorch, as its users call it",
    "_functional_collectives": "of PyTorch, as its users import it",
    "_make_nccl_premul_sum": "of PyTorch, whose public name for it is younger",
    "_make_wrapper_subclass": "of PyTorch, for a tensor that pretends to be on another device",
    "_optimizer_step_pre_hooks": "of PyTorch, to see that hooks are gone",
    "_register_backend": "of PyTorch, to build a group as torchft does",
    "_set_params_and_buffers_to_ignore_for_model": "of PyTorch, as users of DDP call it",
    "_set_default_backend": "of PyTorch, to build a group as torchft does",
    "_Work": "of PyTorch, as torchft's own is",
    "_link": "a worker's connection to the aggregator breaks inside the process, as when that dies",
    "_pending": "a thread must be held at the one place where another may overtake it",
    "_registry": "a test that registers a compressor must take it back",
    "_slots": "a test damages a record on disk and must know where it lies",
    "_write": "what a store does in the background must be held, and must fail",
}
"""What tests use of what is private, and why public behavior cannot tell. Nothing else may be."""


def private_names(path: Path) -> Iterator[str]:
    """Names with a leading underscore that a file uses of other modules' objects: attributes, imports, patches."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_tests_observe_what_is_public() -> None:
    paths = [path for path in sorted(TESTS.rglob("*.py")) if "experiments" not in path.parts]
    used = {name: path for path in paths for name in private_names(path)}
    assert {name: path for name, path in used.items() if name not in PRIVATE_IN_TESTS} == {}
    assert set(PRIVATE_IN_TESTS) <= set(used), "an exception that nothing needs any more"


def test_import_is_lean() -> None:
    """`import thinwire` brings in nothing that only commands, accelerators or other trainings than DDP's need; what is
    left out is there when it is asked for."""
    heavy = ["triton", "matplotlib", "rich", "tyro", "scipy", "sklearn", "torch._dynamo", "torch._inductor"]
    heavy += [f"thinwire.{name}" for name in ("local", "optim", "store", "pipeline", "trainers", "integrations.fsdp")]
    code = (
        f"import sys, torch\nbefore = set(sys.modules)\nimport thinwire\n"
        f"print([m for m in {heavy!r} if m in sys.modules and m not in before])\n"
        "assert thinwire.local.DiLoCo and thinwire.optim.Muon and thinwire.store.Memory and thinwire.Wire"
    )
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_what_the_first_optimizer_imports_is_known() -> None:
    code = f"import sys, torch; torch.optim.SGD([torch.ones(1)]); assert {OPTIMIZERS_IMPORT!r} in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_every_public_name_is_documented_and_there_are_few() -> None:
    assert len(thinwire.__all__) <= 40
    for name in thinwire.__all__:
        assert getattr(thinwire, name).__doc__, name


def test_the_list_of_slow_tests_names_tests_and_leaves_some_of_every_folder() -> None:
    listed = [line for line in (TESTS / "slow.txt").read_text().splitlines() if not line.startswith("#")]
    for line in listed:
        path, function = line.partition("::")[0], line.rpartition("::")[2] if "::" in line else ""
        assert (TESTS.parent / path).is_file(), line
        assert not function or f"def {function}(" in (TESTS.parent / path).read_text(), line
    for folder in {path.parent for path in TESTS.rglob("test_*.py")}:
        paths = [path.relative_to(TESTS.parent).as_posix() for path in folder.glob("test_*.py")]
        assert not set(paths) <= set(listed), f"`make test` runs nothing of {folder.name}"


def test_docstrings_that_are_fragments_and_british_spellings_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""What is sent."""\nx = 1\n"""Of a step, quant' + 'ised."""\n# The sum is formed anew.\n')
    lines = [finding.removeprefix(f"{path}:") for finding in voice.findings(str(path), reads_prose=True)]
    assert [line.partition(":")[::2] for line in sorted(lines)] == [
        ("1", " a docstring begins as a fragment: What is sent."),
        ("3", " British spelling: quant" + "ised"),
        ("3", " a docstring begins as a fragment: Of a step, quant" + "ised."),
        ("4", " 'anew'"),
    ]


def test_faults_that_are_seeded_name_their_place_and_a_test() -> None:
    for mutant in json.loads((TESTS / "mutants.json").read_text()):
        path, _, test = mutant["test"].partition("::")
        assert (TESTS.parent / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant["fault"]
        name = test.partition("[")[0].rpartition("::")[2] or test.partition("[")[0]
        assert f"def {name}(" in (TESTS.parent / path).read_text(), mutant["fault"]


def test_slow_tests_are_chosen_by_what_they_took() -> None:
    log = """\
12.00s setup    tests/a/test_x.py::test_one
1.00s call     tests/a/test_x.py::test_two[3-4]
4.00s call     tests/a/test_y.py::test_three[a]
5.00s call     tests/a/test_y.py::test_three[b]
2.00s call     tests/a/test_y.py::test_four
= 5 passed in 24.00s =
""".splitlines()
    units = slow_tests.durations(log)
    assert units == {
        "tests/a/test_x.py": 13.0,
        "tests/a/test_y.py::test_three": 9.0,
        "tests/a/test_y.py::test_four": 2.0,
    }
    assert slow_tests.choose(units, 24.0) == []
    assert slow_tests.choose(units, 11.0) == ["tests/a/test_x.py"]
    assert slow_tests.choose(units, 3.0) == ["tests/a/test_x.py", "tests/a/test_y.py::test_three"]


def test_the_layers_of_contributing_are_those_of_pyproject_and_of_the_code() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    (contract,) = (c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    layers = [tuple(row.split(" | ")) for row in contract["layers"]]
    section = (TESTS.parent / "CONTRIBUTING.md").read_text().partition("## Layout")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    short = [tuple(name.rpartition(".")[2] for name in row) for row in layers]
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == short
    modules = {
        f"{package.name}.{path.stem}"
        for package in (ROOT, TOOLS)
        for path in package.iterdir()
        if (path.suffix == ".py" and not path.name.startswith("__")) or (path / "__init__.py").exists()
    }
    assert modules == {name for row in layers for name in row}
