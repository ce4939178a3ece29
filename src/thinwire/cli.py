"""The ``thinwire`` command."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import Console

# A command is imported when it is asked for: `thinwire lab` should not wait for what `thinwire demo` needs.
_COMMANDS = {
    "demo": "thinwire.repro.demo:demo",
    "doctor": "thinwire.doctor.command:doctor",
    "lab": "thinwire.lab.command:lab",
    "aggregator": "thinwire.aggregator.command:aggregator",
    "bench kernels": "thinwire.bench.kernels:kernels",
    "bench allreduce": "thinwire.bench.allreduce:allreduce",
    "bench topologies": "thinwire.bench.topologies:topologies",
    "bench step": "thinwire.bench.step:step",
    "bench doctor": "thinwire.bench.doctor:doctor",
    "bench auto": "thinwire.bench.auto:auto",
    "bench cuda": "thinwire.bench.cuda:cuda",
    "bench blob": "thinwire.bench.blob:blob",
    "bench compressors": "thinwire.bench.compressors:compressors",
    "compare": "thinwire.repro.compare:compare",
    "compare every": "thinwire.repro.every:every",
    "plan show": "thinwire.repro.plan_show:plan_show",
    "repro all": "thinwire.repro.everything:repro_all",
    "repro fft": "thinwire.repro.fft.command:fft",
    "repro cgx": "thinwire.repro.cgx.command:cgx",
    "repro intsgd": "thinwire.repro.intsgd.command:intsgd",
    "repro lgreco": "thinwire.repro.lgreco.command:lgreco",
    "repro qsdp": "thinwire.repro.qsdp.command:qsdp",
    "repro aqsgd": "thinwire.repro.aqsgd.command:aqsgd",
    "repro fullstack": "thinwire.repro.fullstack.command:fullstack",
}

_HELP = """\
[bold]thinwire[/]: train over slow networks as if they were fast.

  [bold]thinwire demo[/]              train over a 100 Mbit/s wire: fp32, bf16, PowerSGD and thinwire; the same loss?
  [bold]thinwire doctor[/]            is a training bound by its network? what would help, and by how much
  [bold]thinwire lab[/]               run any torchrun-style script over a slow network, emulated on this machine
  [bold]thinwire aggregator[/]        add up integers in the network, as a programmable switch would, for intsgd
  [bold]thinwire bench kernels[/]     how fast this machine quantises, beside a plain copy
  [bold]thinwire bench allreduce[/]   an all-reduce over a slow link, beside gloo and beside its own limit
  [bold]thinwire bench topologies[/]  the same by ring, tree, hierarchy ... and through shared memory, over many links
  [bold]thinwire bench step[/]        a training step over a slow link, beside stock DDP and beside its own limit
  [bold]thinwire bench doctor[/]      steps that doctor foretells beside steps that are taken, over eight links
  [bold]thinwire bench auto[/]        what auto decides and gains over seven networks
  [bold]thinwire bench cuda[/]        the same on a GPU: speed and launches of each compressor, ranks that share the GPU
  [bold]thinwire bench blob[/]        DDP over a process group that compresses buffers, beside compressing layers
  [bold]thinwire bench compressors[/] error, bytes and speed of every compressor on the gradients of a real training
  [bold]thinwire compare[/]           is it the same loss? paired runs, an interval, a control that must fail
  [bold]thinwire compare every[/]     the same for every compressor at once, with and without error feedback
  [bold]thinwire plan show[/]         which compressor each layer has, what that saves and errs; as a table or a picture
  [bold]thinwire repro all[/]         all that follow, one after the other, and one page of every claim
  [bold]thinwire repro fft[/]         the FFT sparsification paper's figures on this machine: does each claim hold?
  [bold]thinwire repro cgx[/]         the thesis's chapter on CGX, table by table: does each claim hold?
  [bold]thinwire repro intsgd[/]      the IntSGD paper's experiments: integers on the wire; does each claim hold?
  [bold]thinwire repro lgreco[/]      the thesis's chapter on L-GreCo, compression layer by layer: does each claim hold?
  [bold]thinwire repro qsdp[/]        the thesis's chapter on QSDP, FSDP with quantised weights: does each claim hold?
  [bold]thinwire repro aqsgd[/]       the AQ-SGD paper's experiments, pipelines over slow links: does each claim hold?
  [bold]thinwire repro fullstack[/]   all of it compressed: pipelines in replicas, split learning: does each claim hold?

  thinwire COMMAND --help       what a command takes, with examples

Examples:
  thinwire demo
  thinwire lab --ranks 2 --rate 100mbit -- python train.py
  thinwire bench allreduce --rate 1gbit --ranks 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    if not args or args[0] in ("-h", "--help", "help"):
        console.print(_HELP)
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        console.print(f"thinwire {version('thinwire')}")
        return 0
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in _COMMANDS:
            return _run(name, args[words:])
    Console(stderr=True, highlight=False).print(
        f"thinwire has no command {args[0]!r}; it has {', '.join(_COMMANDS)}. See: thinwire --help"
    )
    return 2


def _run(name: str, args: list[str]) -> int:
    module, function = _COMMANDS[name].split(":")
    command: Callable[..., Any] = getattr(importlib.import_module(module), function)
    # All of the docstring but its arguments, which tyro shows as options: on its own tyro would drop the examples.
    about = inspect.cleandoc(command.__doc__ or "").split("\nArgs:")[0].strip()
    if name in ("lab", "doctor") and "--" in args:
        # What follows `--` belongs to the command or script that is run, options and all.
        at = args.index("--")
        command, args = functools.partial(command, args[at + 1 :]), args[:at]
    try:
        code = tyro.cli(command, prog=f"thinwire {name}", args=args, description=about)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
