"""What a GPU is asked first: stages in the order of their worth, each in processes, a log and a JSON file of its own.

A stage that fails, crashes or hangs does not keep the next from running, and what has ended is on disk. With
``--rehearse`` the same runs without a GPU: Triton's interpreter, gloo and CPU tensors, all of it tiny.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGE_S, TOTAL_S = 90.0, 530.0
NO_GPU = 42
"""The exit code, none of pytest's, of a machine on which nothing else needs to be tried."""

CUDA, DEVICE, KERNELS = (f"tests/kernels/test_{name}.py" for name in ("cuda", "triton_device", "triton"))
BYTES = "same_bits and (-4-128- or sides-1-128 or sign-1-128)"
RANKS = "world_of_one or share_a_gpu or shards_on_a_gpu or steady or not_finite or what_waits"
REST = f"not ({BYTES}) and not ({RANKS}) and not compile and not registers"
SMALL = f"(test_cuda and ({RANKS})) or (all_kinds and 2)"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A job of this file, if it has one, then tests: files and pytest's ``-k``, on a GPU and rehearsed."""

    name: str
    what: str
    job: str = ""
    tests: tuple[tuple[str, ...], str] = ((), "")
    rehearsed: tuple[tuple[str, ...], str] = ((), "")


STAGES = (
    Stage("bytes", "versions; messages of 4 bits, and of signs", "about", ((KERNELS,), BYTES), ((KERNELS,), BYTES)),
    Stage("ranks", "NCCL, ranks that share the GPU, no host waits", "", ((CUDA,), RANKS), ((CUDA, DEVICE), SMALL)),
    Stage("speed", "GB/s and launches beside a copy", "speed"),
    Stage("train", "a GPT in fp32 and compressed", "train"),
    Stage("profile", "one step: gaps and overlap", "profile"),
    Stage("rest", "all other tests", "", ((CUDA, DEVICE, KERNELS), REST), ((CUDA,), REST)),
)


@dataclass
class Outcome:
    """What a stage leaves."""

    stage: str
    ok: bool = True
    seconds: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    first_failure: str = ""
    figures: list[Figures] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run all stages, or a job, and say what failed first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", nargs="?", choices=sorted(JOBS), help="of a stage, in this process")
    parser.add_argument("--json", type=Path, required=True, help="file for all figures, written after each stage")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/first-gpu", help="of their logs and JSON files")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    told = parser.parse_args(argv)
    if told.job:
        return do(told.job, told.json, told.rehearse)
    told.folder.mkdir(parents=True, exist_ok=True)
    outcomes, ends = [], time.monotonic() + TOTAL_S
    for stage in STAGES:
        deadline = min(time.monotonic() + STAGE_S * (3 if told.rehearse else 1), ends)
        say(f"{stage.name}: {stage.what} ...")
        outcome, code = run(stage, told.folder, deadline, told.rehearse)
        outcomes.append(outcome)
        (told.folder / f"{stage.name}.json").write_text(json.dumps(vars(outcome), indent=1) + "\n")
        about = {"command": "make cuda", "rehearsed": told.rehearse, "stages": [vars(o) for o in outcomes]}
        told.json.write_text(json.dumps(about, indent=1) + "\n")
        if code == NO_GPU:
            break
    say(table(outcomes))
    return int(not all(outcome.ok for outcome in outcomes))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(outcomes: list[Outcome]) -> str:
    lines = [f"\n{'stage':8} {'':6} {'s':>6}  tests"]
    for o in outcomes:
        tests = ", ".join(f"{count} {how}" for how, count in o.tests.items())
        lines.append(f"{o.stage:8} {'ok' if o.ok else 'FAILED':6} {o.seconds:6.1f}  {tests}".rstrip())
    first = next((o for o in outcomes if not o.ok), None)
    return "\n".join([*lines, f"first failure: {first.stage}: {first.first_failure}" if first else "nothing failed"])


def run(stage: Stage, folder: Path, deadline: float, rehearse: bool) -> tuple[Outcome, int]:
    """Run what a stage consists of until ``deadline``; its outcome, and the last exit code."""
    log, figures = folder / f"{stage.name}.log", folder / f"{stage.name}-figures.json"
    figures.unlink(missing_ok=True)
    commands, code, started = [], 0, time.monotonic()
    if stage.job:
        commands.append([__file__, stage.job, "--json", str(figures), *(["--rehearse"] if rehearse else [])])
    files, chosen = stage.rehearsed if rehearse else stage.tests
    if files:
        # Most of the time kernels are compiled, which several processes do side by side.
        side = ["-n", str(min(8, (os.cpu_count() or 2) // 2))] if find_spec("xdist") and not rehearse else []
        options = ["-v", "--tb=short", "-W", "default", "-p", "no:cacheprovider", *side]
        commands.append(["-m", "pytest", *options, *files, "-k", chosen])
    outcome = Outcome(stage.name)
    with log.open("w") as to:
        for command in commands:
            code = finish([sys.executable, *command], to, deadline, rehearse)
            outcome.ok = outcome.ok and code == 0
            if code == NO_GPU:
                break
    text = log.read_text(errors="replace")
    outcome.seconds = round(time.monotonic() - started, 1)
    outcome.tests, outcome.first_failure = read(text)
    if outcome.ok and not rehearse and files and not outcome.tests.get("passed"):
        outcome.ok, outcome.first_failure = False, "no test ran"
    if outcome.ok:
        outcome.first_failure = ""
    elif not outcome.first_failure:
        ended = "cut at its limit of time" if code == -signal.SIGKILL else f"exit code {code}"
        outcome.first_failure = f"{ended}, after: {(text.split(chr(10))[-2:-1] or [''])[0][-200:]}"
    if figures.exists():
        outcome.figures = json.loads(figures.read_text())
    return outcome, code


def finish(command: list[str], log: Any, deadline: float, rehearse: bool) -> int:
    """Run a command, with all that it starts, until ``deadline``; its exit code."""
    there = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), **({"TRITON_INTERPRET": "1"} if rehearse else {})}
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **there}, start_new_session=True
    )
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        # Ranks of a process that has crashed would hold the GPU through the next stages.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(log: str) -> tuple[dict[str, int], str]:
    """How many tests did what, of a log that may end anywhere, and the first that failed, with its error."""
    seen = re.findall(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|ERROR|SKIPPED) )?(tests/\S+::.+?)"
                      r"(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)?$", log, re.MULTILINE)  # fmt: skip
    told = [(before or after, name) for before, name, after in seen if before or after]
    counts = {how.lower(): sum(h == how for h, _ in told) for how in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    error = re.search(r"^E +(.+)|^(\w+(?:\.\w+)*(?:Error|Exception): .+)", log, re.MULTILINE)
    failed = next((name for how, name in told if how in ("FAILED", "ERROR")), "")
    why = (error[1] or error[2]) if error else ""
    return {how: count for how, count in counts.items() if count}, " ".join(filter(None, (failed, why)))[:400]


# ---- Jobs ---------------------------------------------------------------------------------------------------------


def do(job: str, to: Path, small: bool) -> int:
    """Run a job; its figures are on disk as it gives them."""
    import torch

    if not small and not torch.cuda.is_available():
        say(f"This PyTorch ({torch.__version__}) sees no CUDA device; CUDA_ARGS=--rehearse does without.")
        return NO_GPU
    figures: list[Figures] = []
    for given in JOBS[job](small):
        figures.append(given)
        say(json.dumps(given))
        # Whoever is killed while it writes leaves the former file.
        written = to.with_suffix(".new")
        written.write_text(json.dumps(figures, indent=1) + "\n")
        written.replace(to)
    return 0


def place() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def about(small: bool) -> Iterator[Figures]:
    import torch
    import triton

    from thinwire import kernels
    from thinwire_tools.results import machine, versions

    yield {**versions(), "triton": triton.__version__, "cuda": torch.version.cuda, "cpu_level": kernels.cpu_level()}
    yield machine()
    if torch.cuda.is_available():
        it = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield {"device": it.name, "capability": f"{it.major}.{it.minor}", "memory_bytes": it.total_memory, "nccl": nccl}


def speed(small: bool) -> Iterator[Figures]:
    """Figures of `thinwire bench cuda` for several sizes, DDP's usual one first."""
    from thinwire_tools.bench.cuda import Row, compressors, reductions

    device, repeats = place(), 1 if small else 10
    specs = ("minmax(bits=4)", "ef(minmax(bits=4))", "minmax(bits=8, bucket=1024)", "ef(onebit)", "raw")

    def shown(rows: list[Row], numel: int, copy_s: float) -> Figures:
        found: Figures = {"size_mb": numel / 2**18, "memory_GB/s": round(8 * numel / copy_s / 1e9, 1)}
        for row in rows:
            rate = round(4 * numel / row.seconds / 1e9, 2)
            found[row.name] = {"GB/s": rate, "x_copy": round(copy_s / row.seconds, 3), "launches": row.launches}
        return found

    copy_s = 1.0
    for size_mb in (0.2,) if small else (25, 1, 256, 4, 64):
        numel = int(size_mb * 2**18)
        rows = compressors(device, numel, repeats, specs)
        copy_s = rows[0].seconds
        yield shown(rows, numel, copy_s)
    numel = 1 << 16 if small else 25 << 18
    yield shown(reductions(device, numel, repeats, 2 if small else 4), numel, copy_s)


def as_if_there_were_others() -> None:
    """Have the only rank compress and exchange what it would among several: it owns everything, and sends nothing."""
    from thinwire.runtime.bucket_engine import Bucket, BucketEngine

    usual = BucketEngine.reduce

    def reduce(self, flat, layers, *, loss_scale=1.0):
        if self.simulated or self.dense:
            return usual(self, flat, layers, loss_scale=loss_scale)
        made = self._make(flat, layers, loss_scale)
        bucket = {"flat": flat, "layers": layers, "loss_scale": loss_scale, "made": made, "failed": None}
        return self.channel.submit(Bucket(kind="all_reduce", dtype=flat.dtype, number=self.step, engine=self, **bucket))

    BucketEngine.reduce = reduce


def trainer(small: bool, spec: str | None) -> tuple[Callable[[], Any], int, Any]:
    """What makes one step of a GPT on Python's own library and returns its loss, how many parameters, and its wire."""
    import torch

    from thinwire.integrations.ddp import Options, attach_ddp
    from thinwire_tools.compare.gpt import GPTConfig
    from thinwire_tools.compare.tasks import GPTTask

    device = place()
    large = not small and torch.cuda.get_device_properties(0).total_memory > 30e9
    width, layers, context, batch = (32, 2, 32, 2) if small else (1024, 8, 256, 16) if large else (512, 8, 256, 16)
    torch.set_float32_matmul_precision("high")
    shape = GPTConfig(context=context, width=width, layers=layers, heads=max(2, width // 64))
    task = GPTTask(shape, steps=300, batch=batch, bucket_cap_mb=25.0)
    model = task.distribute(task.build(0).to(device))
    as_if_there_were_others()
    options = Options(compressor=spec, skip_if_slower=False, as_device=device.type == "cpu")
    wire = attach_ddp(model, options) if spec else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = iter([tuple(part.to(device) for part in pair) for pair in task.batches(0, 0, 1)])

    def step() -> Any:
        optimizer.zero_grad()
        loss = task.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, sum(p.numel() for p in model.parameters()), wire


def alone(run: Callable[[bool], Iterator[Figures]]) -> Callable[[bool], Iterator[Figures]]:

    def inside(small: bool) -> Iterator[Figures]:
        import torch.distributed as dist

        with tempfile.TemporaryDirectory() as folder:
            backend = "nccl" if place().type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
            yield from run(small)
            dist.destroy_process_group()

    return inside


def wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(small: bool) -> Iterator[Figures]:
    """Loss, milliseconds a step and memory of some steps in fp32 and compressed."""
    import torch

    steps, warm = (6, 2) if small else (200, 20)
    for spec in (None, "minmax(bits=4)", "ef(minmax(bits=2))", "ef(topk(density=0.01))"):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step, parameters, _wire = trainer(small, spec)
        losses, started = [], 0.0
        for i in range(steps):
            if i == warm:
                wait()
                started = time.perf_counter()
            losses.append(step())
        wait()
        taken_s = (time.perf_counter() - started) / (steps - warm)
        end = torch.stack(losses[-max(2, steps // 10) :]).mean().item()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        figures = {"spec": spec or "fp32", "parameters": parameters, "steps": steps, "first_loss": losses[0].item()}
        yield {**figures, "last_loss": end, "step_ms": round(1e3 * taken_s, 3), "peak_bytes": peak}
        del step, _wire


def profile(small: bool) -> Iterator[Figures]:
    """What a profiler saw of one step, in fp32 and compressed."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    for spec in (None, "minmax(bits=4)"):
        step, _, _wire = trainer(small, spec)
        for _ in range(5):
            step()
        wait()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with torch.profiler.profile(activities=activities) as seen:
            step()
            wait()
        with tempfile.TemporaryDirectory() as folder:
            trace = f"{folder}/trace.json.gz"
            seen.export_chrome_trace(trace)
            events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
        yield {"spec": spec or "fp32", **timeline(events, kinds)}
        del step, _wire


Span = tuple[float, float]


def merged(spans: list[Span]) -> list[Span]:
    """The same time, in spans that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def timeline(events: list[Figures], kinds: tuple[str, ...]) -> Figures:
    """Milliseconds of one step: the device's work, its gaps, and what other streams do while the busiest one works."""
    streams: dict[Any, list[Span]] = {}
    stages: dict[str, float] = {}
    for event in events:
        if event.get("cat") in kinds:
            stream = event.get("args", {}).get("stream", event["tid"])
            streams.setdefault(stream, []).append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat", "").endswith("user_annotation") and event["name"].startswith("thinwire "):
            name = f"{event['name']} ({'device' if event['cat'].startswith('gpu') else 'host'})"
            stages[name] = stages.get(name, 0.0) + event["dur"] / 1e3
    every = merged([span for spans in streams.values() for span in spans])
    if not every:
        raise RuntimeError(f"the profiler saw no {' or '.join(kinds)}")

    def total(spans: list[Span]) -> float:
        return sum(end - start for start, end in spans) / 1e3

    ordered = sorted((merged(spans) for spans in streams.values()), key=total, reverse=True)
    others = merged([span for spans in ordered[1:] for span in spans])
    gaps = [after[0] - before[1] for before, after in pairwise(every)]
    return {
        "span_ms": (every[-1][1] - every[0][0]) / 1e3,
        "busy_ms": total(every),
        "gaps_ms": sum(gaps) / 1e3,
        "gaps_above_20us": sum(gap > 20 for gap in gaps),
        "longest_gap_ms": max(gaps, default=0.0) / 1e3,
        "launches": sum(map(len, streams.values())),
        "busiest_stream_ms": total(ordered[0]),
        "other_streams_ms": total(others),
        "overlap_ms": total(ordered[0]) + total(others) - total(every),
        "stages_ms": stages,
    }


JOBS: dict[str, Callable[[bool], Iterator[Figures]]] = {
    "about": about, "speed": speed, "train": alone(train), "profile": alone(profile),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
