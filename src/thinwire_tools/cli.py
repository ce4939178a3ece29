"""The ``thinwire`` command.

It is outside of the library because importing anything of ``thinwire`` imports PyTorch, which takes seconds: help and
version should not wait for that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Command:
    """One command of a `Program`.

    Args:
        target: ``"module:function"``, whose parameters tyro makes into options. The module is imported for help, too:
            the function itself imports what needs PyTorch.
        summary: what it does, in a line of help.
        takes_script: whether what follows ``--`` is a program to run, passed to the function as its first argument.
        with_script: the function in place of ``target`` where a program follows ``--``, if that is another.
        forms: where there is such a function, what the command is for without a program, and with one.
    """

    target: str
    summary: str
    takes_script: bool = False
    with_script: str | None = None
    forms: tuple[str, str] | None = None

    def load(self, *, script: bool = False) -> Callable[..., Any]:
        """Import the function: the one for a program, if ``script``."""
        module, function = (self.with_script if script and self.with_script else self.target).split(":")
        return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class Program:
    """A command line of several commands.

    Args:
        name: what the user types before a command.
        about: one line on what the program is for.
        groups: the commands by their words, under the heading that help shows them under.
        examples: command lines to show at the end of the help.
    """

    name: str
    about: str
    groups: Mapping[str, Mapping[str, Command]]
    examples: Sequence[str] = ()

    @property
    def commands(self) -> dict[str, Command]:
        return {words: command for group in self.groups.values() for words, command in group.items()}

    def run(self, args: list[str]) -> int:
        """Run a command; returns its exit code."""
        commands = self.commands
        if not args or args[0] in ("-h", "--help", "help"):
            self._print_help(self.groups, self.examples)
            return 0
        for count in (2, 1):
            words = " ".join(args[:count])
            if words in commands:
                return self._run(words, commands[words], args[count:])
        members = {words: command for words, command in commands.items() if words.startswith(f"{args[0]} ")}
        if members and (len(args) == 1 or args[1] in ("-h", "--help")):
            self._print_help({f"{self.name} {args[0]}": members}, ())
            return 0
        known = ", ".join(members or commands)
        Console(stderr=True, highlight=False).print(
            f"{self.name} has no command {' '.join(args[: 2 if members else 1])!r}; it has {known}. "
            f"See: {self.name} --help",
            markup=False,
        )
        return 2

    def _print_help(self, groups: Mapping[str, Mapping[str, Command]], examples: Sequence[str]) -> None:
        console = Console(highlight=False)
        console.print(f"[bold]{self.name}[/]: {self.about}")
        width = max(len(words) for group in groups.values() for words in group)
        for heading, group in groups.items():
            console.print(f"\n[bold]{heading}[/]")
            for words, command in group.items():
                console.print(f"  [bold]{words:{width}}[/]  {escape(command.summary)}", soft_wrap=True)
        console.print(f"\nOptions and examples of a command: {self.name} COMMAND --help")
        if examples:
            console.print("\n[bold]Examples[/]")
        for line in examples:
            console.print(f"  {line}", markup=False, soft_wrap=True)

    def _run(self, words: str, command: Command, args: list[str]) -> int:
        try:
            return self._call(words, command, args)
        except KeyboardInterrupt:
            # Only one of several ranks on a machine prints.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                sys.stderr.write(f"\n{self.name} {words}: interrupted\n")
            return 130
        except BrokenPipeError:
            if not {"-h", "--help"} & set(args):
                raise
            # A reader such as `head` has read enough of the help; Python flushes once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            # Code that raises a `CommandError` has imported this module; here that would import PyTorch.
            exits = sys.modules.get("thinwire_tools.exits")
            if exits is None or not isinstance(error, exits.CommandError):
                raise
            ended: Any = error
            if ended.exit_code != exits.USAGE or os.environ.get("LOCAL_RANK", "0") == "0":
                console = Console(stderr=True, highlight=False)
                console.print(f"{self.name} {words}: {ended}", style="bold red", markup=False, soft_wrap=True)
                if ended.details:
                    console.print(ended.details, style="red", markup=False, soft_wrap=True)
            return ended.exit_code

    def _call(self, words: str, command: Command, args: list[str]) -> int:
        import tyro

        split = args.index("--") if "--" in args else len(args)
        given = args[:split]
        if command.forms is not None:
            if split == len(args) and ("-h" in given or "--help" in given):
                return self._print_forms(words, command)
            if misplaced := _find_other_option(command, given, script=split < len(args)):
                form = command.forms[split == len(args)]
                line = f"{self.name} {words}: {misplaced} is an option for {form} only. See: {self.name} {words} --help"
                Console(stderr=True, highlight=False).print(line, markup=False, soft_wrap=True)
                return 2
        function = command.load(script=split < len(args))
        about = _description(function)
        if command.takes_script and split < len(args):
            function = functools.partial(function, args[split + 1 :])
        function = _with_plain_help(function)
        code = tyro.cli(function, prog=f"{self.name} {words}", args=given, description=about)
        return code if isinstance(code, int) else 0

    def _print_forms(self, words: str, command: Command) -> int:
        """Return the help of a command that does one thing without a program and another with one."""
        import tyro

        assert command.forms is not None
        console = Console(highlight=False)
        calls = [f"{self.name} {words} [OPTIONS] [SPEC ...]"]
        calls += [f"{calls[0]} -- SCRIPT ..."]
        width = max(map(len, calls))
        console.print(f"[bold]{self.name} {words}[/] has two forms, each with options of its own:\n")
        for call, form in zip(calls, command.forms, strict=True):
            console.print(f"  {call:{width}}  {form}", markup=False, soft_wrap=True)
        for script, form in enumerate(command.forms):
            console.print(f"\n[bold]For {form}[/]\n")
            function = command.load(script=bool(script))
            about = _description(function)
            with contextlib.suppress(SystemExit):  # how tyro ends after help
                tyro.cli(_with_plain_help(function), prog=f"{self.name} {words}", args=["--help"], description=about)
        return 0


def _find_other_option(command: Command, args: Sequence[str], *, script: bool) -> str | None:
    """Return the first of ``args`` that is an option of only the other form, if there is one."""
    options = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    if not options:
        return None
    mine, other = (
        {f"--{name.replace('_', '-')}" for name in inspect.signature(command.load(script=form)).parameters}
        for form in (script, not script)
    )
    return next((option for option in options if option in other - mine), None)


def _description(function: Callable[..., Any]) -> str:
    """Return the docstring without its arguments, which tyro shows as options; tyro would drop the examples.

    Paragraphs are wrapped to the terminal's width, which would cut words in two. Lines to copy stay; tyro joins those
    of a description unless they are indented.
    """
    text = inspect.cleandoc(function.__doc__ or "").split("\nArgs:")[0].strip()
    fill = textwrap.TextWrapper(
        Console().width, initial_indent=" ", subsequent_indent=" ", break_long_words=False, break_on_hyphens=False
    ).fill
    return "\n\n".join(part if "\n  " in part else fill(part) for part in text.split("\n\n")).lstrip()


def _with_plain_help(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with options that help shows as ``--rate TEXT`` and ``-- SCRIPT ...``: tyro writes ``--rate
    {None}|STR (default: None)`` and ``[[STR [STR ...]]]``."""
    import tyro

    called = getattr(function, "func", function)
    hints = get_type_hints(called, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        notes = [note for note in get_args(kind)[1:] if get_origin(kind) is Annotated and hasattr(note, "metavar")]
        bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if get_origin(bare) is tuple:
            kinds = [_SEVERAL.get(name, "TEXT ...")]
        elif type(None) in get_args(bare):
            kinds = [each.__name__ for each in get_args(bare) if each is not type(None)]
        else:
            continue
        metavar = notes[0].metavar if notes else _METAVARS.get(kinds[0], kinds[0].upper())
        hint = "" if parameter.default in (None, (), parameter.empty) else None
        hints[name] = Annotated[kind, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]

    @functools.wraps(called)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    del call.__wrapped__  # type hints would be taken from there
    call.__annotations__ = hints
    # A program is last on the command line.
    given = inspect.signature(function).parameters.values()
    parameters = sorted(given, key=lambda each: (each.kind is each.KEYWORD_ONLY, each.name == "script"))
    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return call


_METAVARS = {"str": "TEXT", "float": "NUMBER"}
_SEVERAL = {"script": "-- SCRIPT ...", "command": "-- COMMAND ...", "variants": "SPEC ...", "compressors": "SPEC ..."}
THINWIRE = Program(
    "thinwire",
    "train over slow networks as if they were fast.",
    {
        "Start here": {
            "demo": Command(
                "thinwire_tools.compare.command:demo", "training over a 100 Mbit/s link, with and without thinwire"
            ),
            "doctor": Command(
                "thinwire_tools.doctor.command:doctor", "would it help your training, and by how much?", True
            ),
        },
        "Choose": {
            "compare": Command(
                "thinwire_tools.compare.command:compare",
                "do these compressors keep the loss? paired runs",
                takes_script=True,
                with_script="thinwire_tools.compare.command:compare_script",
                forms=("a small GPT of its own", "your own script"),
            ),
            "compare every": Command("thinwire_tools.compare.command:every", "the same for every compressor"),
        },
        "Run": {
            "run": Command("thinwire_tools.run.command:run", "a script with compression, without a change to it", True),
            "lab": Command("thinwire_tools.lab.command:lab", "any script over a slow network, emulated here", True),
            "aggregator": Command("thinwire_tools.aggregator:aggregator", "a server that sums integers for intsgd"),
        },
        "Measure": {
            "bench kernels": Command(
                "thinwire_tools.bench.command:kernels", "speed of compression, beside a plain copy"
            ),
            "bench allreduce": Command(
                "thinwire_tools.bench.command:allreduce", "an all-reduce beside gloo's, on a link"
            ),
            "bench step": Command("thinwire_tools.bench.command:step", "a training step beside DDP's, on a slow link"),
            "bench cuda": Command("thinwire_tools.bench.command:cuda", "compressors on a GPU: speed and launches"),
        },
    },
    (
        "thinwire demo",
        "torchrun --nproc-per-node 2 -m thinwire doctor -- train.py",
        "torchrun --nproc-per-node 2 -m thinwire run --compress 4bit -- train.py",
        "thinwire lab --ranks 2 --rate 100mbit -- python train.py",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of ``thinwire``; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        Console(highlight=False).print(f"thinwire {metadata.version('thinwire')}")
        return 0
    return THINWIRE.run(args)
