"""What a Wire shows of itself: records of its statistics, and the timeline of its worker."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_wire import MIXED, gradients, make, step_on
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks, run_threads
from thinwire import parse
from thinwire.collectives import CollectiveCall, Layer, Layout, all_reduce, complete
from thinwire.compressors import Coded
from thinwire.runtime import Stats, ThreadExecutor
from thinwire.runtime.executor import Job, Then
from thinwire.runtime.log import StatsLogger
from thinwire.runtime.timeline import Timeline, merge_timelines, rank_path


class FakeSummaryWriter:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag, scalar_value, global_step) -> None:
        self.scalars.setdefault(tag, []).append((scalar_value, global_step))


class FakeRun:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, data, step) -> None:
        self.records.append((step, data))


def records_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_intervals_add_up_to_the_totals(tmp_path, every: int) -> None:
    """Of 5 steps, two before ``start``: with every=2 or 3 the last record is one that leaving writes."""

    def run(transport):
        wire = make(transport, MIXED, start=2)
        with StatsLogger(wire, tmp_path / "new" / "stats.jsonl", every=every) as logger:
            for step in range(5):
                step_on(wire, gradients(transport.rank, step))
                logger.log()
        logger.close()
        return wire.stats

    stats = run_threads(run, 2)[0]
    records = records_of(tmp_path / "new" / "stats.jsonl")
    assert [r["step"] for r in records] == {1: [0, 1, 2, 3, 4], 2: [1, 3, 4], 3: [2, 4]}[every]
    assert {r["rank"] for r in records} == {0}
    last = records[-1]
    assert {name: last[f"total/{name}"] for name in ("steps", "payload_sent_bytes", "encode_s", "ratio")} == {
        name: stats.to_dict()[name] for name in ("steps", "payload_sent_bytes", "encode_s", "ratio")
    }
    assert last["now/slot_bytes"] == stats.slot_bytes > 0
    for name in ("steps", "payload_sent_bytes", "nonfinite_steps"):
        assert sum(r[f"interval/{name}"] for r in records) == last[f"total/{name}"]
    for name in ("encode_s", "wire_s", "decode_s", "payload_sent_bytes"):
        whole = sum(r[f"per_step/{name}"] * r["interval/steps"] for r in records)
        assert whole == pytest.approx(last[f"total/{name}"]), name
        assert whole > 0
    assert sum(r["interval/compressed_share"] * r["interval/steps"] for r in records) == stats.compressed_steps
    for r in records:
        assert r["interval/sent_bytes_per_s"] * r["interval/elapsed_s"] == pytest.approx(
            r["interval/payload_sent_bytes"]
        )


def test_rates_after_a_reset_and_without_steps(tmp_path) -> None:
    def run(transport):
        wire = make(transport, "minmax(bits=4)")
        logger = StatsLogger(wire, tmp_path / "stats.jsonl")
        logger.log(step=70)
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        logger.log(step=71)
        wire.reset_stats()
        step_on(wire, gradients(transport.rank, 3))
        logger.log(step=72)

    run_threads(run, 2)
    idle, three, one = records_of(tmp_path / "stats.jsonl")
    assert (idle["step"], idle["interval/steps"], idle["per_step/wire_s"], idle["interval/ratio"]) == (70, 0, 0.0, 1.0)
    assert three["interval/payload_sent_bytes"] == 3 * one["interval/payload_sent_bytes"]
    assert one["per_step/payload_sent_bytes"] == one["total/payload_sent_bytes"] > 0
    assert one["interval/ratio"] == three["interval/ratio"] > 4


def test_who_writes(tmp_path) -> None:
    def run(transport):
        wire = make(transport, "minmax")
        with (
            StatsLogger(wire, tmp_path / "one.jsonl") as one,
            StatsLogger(wire, tmp_path / "all.jsonl", all_ranks=True) as every_rank,
            StatsLogger(wire, FakeRun() if transport.rank == 0 else None) as third,
        ):
            step_on(wire, gradients(transport.rank, 0))
            for logger in (one, every_rank, third):
                logger.log()

    run_threads(run, 3)
    files = ["all.rank0.jsonl", "all.rank1.jsonl", "all.rank2.jsonl", "one.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert [records_of(tmp_path / name)[0]["rank"] for name in files] == [0, 1, 2, 0]


def test_a_file_is_continued_also_after_a_torn_line(tmp_path) -> None:
    path = tmp_path / "stats.jsonl"

    def run(transport):
        wire = make(transport, "minmax")
        for tail in ("", '{"step": 1, "ra'):
            logger = StatsLogger(wire, str(path))
            logger.log(step=5)
            # Flushed: it is there although nobody closed the logger.
            text = path.read_text()
            assert text.endswith("}\n")
            path.write_text(text + tail)

    run_threads(run, 1)
    with StatsLogger(run_threads(lambda t: make(t, "minmax"), 1)[0], path) as logger:
        logger.log(step=6)
    first, second, torn, third = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (first, second, third)] == [5, 5, 6]
    assert torn == '{"step": 1, "ra'


def test_scalar_writers_and_dict_loggers_get_the_same() -> None:
    def run(transport):
        wire = make(transport, "minmax(bits=4)")
        writer, run = FakeSummaryWriter(), FakeRun()
        first, second = StatsLogger(wire, writer), StatsLogger(wire, run)
        for step in range(2):
            step_on(wire, gradients(transport.rank, step))
            first.log(10 + step)
            second.log(10 + step)
        return writer.scalars, run.records, wire.stats

    scalars, records, stats = run_threads(run, 2)[0]
    assert [step for step, _ in records] == [10, 11]
    assert scalars.keys() == records[1][1].keys()
    assert all(tag.startswith("thinwire/") for tag in scalars)
    assert scalars["thinwire/total/payload_sent_bytes"][-1] == (stats.payload_sent_bytes, 11)
    assert records[-1][1]["thinwire/total/payload_sent_bytes"] == stats.payload_sent_bytes
    for tag, values in scalars.items():
        assert [step for _, step in values] == [10, 11]
        if not tag.endswith("_s"):
            assert [value for value, _ in values] == [data[tag] for _, data in records]


def test_a_real_summary_writer(tmp_path) -> None:
    events = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(events, reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    def run(transport):
        wire = make(transport, "minmax(bits=4)")
        writer = SummaryWriter(str(tmp_path)) if transport.rank == 0 else None
        with StatsLogger(wire, writer) as logger:
            step_on(wire, gradients(transport.rank, 0))
            logger.log(7)
        if writer:
            writer.close()
        return wire.stats

    stats = run_threads(run, 2)[0]
    read = reader.EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("thinwire/total/payload_sent_bytes")
    assert (event.step, event.value) == (7, stats.payload_sent_bytes)


def test_a_real_wandb_run(tmp_path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def run(transport):
        wire = make(transport, "minmax(bits=4)")
        step_on(wire, gradients(transport.rank, 0))
        return wire

    wire = run_threads(run, 2)[0]
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off", silent=True)) as real:
        StatsLogger(wire, real).log(3)
        real.log({}, step=4)
        assert real.summary["thinwire/total/steps"] == 1
        assert real.summary["_step"] == 3


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ("stats.csv", {}, ValueError, "stats.csv must end in .jsonl"),
        ("stats.jsonl", {"every": 0}, ValueError, "every must be at least 1, not 0"),
        (3, {}, TypeError, "cannot write statistics to 3: pass a path that ends in .jsonl"),
        (None, {"all_ranks": True}, TypeError, "cannot write statistics to None"),
    ],
)
def test_wrong_targets_are_refused_on_all_ranks(target, options, error, message) -> None:
    def run(transport):
        with pytest.raises(error, match=message):
            StatsLogger(make(transport, "minmax"), target, **options)
        return True

    assert run_threads(run, 2) == [True, True]


def test_a_closed_logger_and_a_full_disk(tmp_path) -> None:
    wire = run_threads(lambda t: make(t, "minmax"), 1)[0]
    logger = StatsLogger(wire, tmp_path / "stats.jsonl")
    logger.close()
    assert (tmp_path / "stats.jsonl").read_text() == ""
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        logger.log()
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        StatsLogger(wire, tmp_path / "full.jsonl").log()


def layout_of(num_ranks: int, *numels: int) -> Layout:
    compressor = parse("minmax(bits=4)")
    assert isinstance(compressor, Coded)
    starts = [sum(numels[:i]) for i in range(len(numels))]
    layers = [Layer(f"layer{i}", starts[i], (numels[i],), compressor) for i in range(len(numels))]
    return Layout.build(layers, num_ranks, torch.float32)


class CountingStats(Stats):
    num_stages = 0

    def stage(self, name: str):
        self.num_stages += 1
        return super().stage(name)


def train(transport, num_steps: int, **options) -> Any:
    """Steps of two buckets, handed over by this thread and reduced by a worker; with options under a Timeline."""
    layouts = [layout_of(transport.world_size, 40_000, 9_000), layout_of(transport.world_size, 70_000)]
    buffers = [transport.open(layout.reduction_traffic()) for layout in layouts]
    stats, worker, results = CountingStats(), ThreadExecutor("test"), []
    timeline = Timeline(lambda: stats, transport.rank, **options) if options else None

    def reduce(x, i: int, step: int) -> Job:
        clock = timeline or stats
        exchange = all_reduce(
            x, layouts[i], transport, buffers[i], CollectiveCall(seed=0, step=2 * step + i, clock=clock)
        )
        next(exchange)
        yield Then.LATER
        complete(exchange)
        return x

    for step in range(num_steps):
        futures = []
        for i, layout in enumerate(layouts):
            x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step + 10 * transport.rank))
            names = [layer.name for layer in layout.layers]
            job = reduce(x, i, step)
            futures.append(worker.submit(timeline.bucket(job, step, names, 4 * layout.numel) if timeline else job))
        results += [future.wait() for future in futures]
    worker.close()
    return timeline, stats, results


def named(trace: dict, phase: str, track: str) -> list[dict]:
    """The events of a phase on a track."""
    tids = [e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == track]
    return [e for e in trace["traceEvents"] if e["ph"] == phase and e["tid"] in tids]


def end(event: dict) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_timeline_of_two_steps(num_ranks: int, tmp_path) -> None:
    def run(transport):
        timeline, stats, _ = train(transport, 2, steps=2)
        timeline.write(tmp_path / f"{transport.rank}.json")
        return stats

    answers = run_threads(run, num_ranks)
    for rank, stats in enumerate(answers):
        trace = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {e["pid"] for e in trace["traceEvents"]} == {rank + 1}
        assert all(e["ts"] >= 0 for e in trace["traceEvents"])
        spans, ready = named(trace, "X", "communication"), named(trace, "i", "backward")
        sent = named(trace, "X", "sending")
        buckets = [e for e in spans if e["name"].startswith("bucket")]
        sendings = [e for e in sent if e["name"].startswith("bucket")]
        stages = [e for e in spans + sent if not e["name"].startswith("bucket")]
        stages.sort(key=lambda e: e["ts"])
        places = [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [(e["args"]["step"], e["args"]["bucket"]) for e in buckets] == places
        assert [(e["args"]["step"], e["args"]["bucket"]) for e in ready] == places
        assert [e["name"] for e in ready] == ["bucket 0 ready", "bucket 1 ready"] * 2
        assert [e["args"]["layers"] for e in buckets] == [["layer0", "layer1"], ["layer0"]] * 2
        assert [e["args"]["bytes"] for e in buckets] == [196_000, 280_000] * 2
        for i, bucket in enumerate(buckets):
            inside = [e for e in stages if (e["args"]["step"], e["args"]["bucket"]) == places[i]]
            # One message to each peer; then that of each peer, and the means of the others one by one.
            others = num_ranks - 1
            assert [e["name"] for e in inside] == ["encode"] * others + ["wire", "reduce"] + ["wire", "decode"] * others
            assert all(end(a) <= b["ts"] + 1e-3 for a, b in pairwise(inside))
            assert sendings[i]["ts"] <= inside[0]["ts"] + 1e-3
            assert end(inside[others - 1]) <= end(sendings[i]) + 1e-3 <= bucket["ts"] + 2e-3
            assert bucket["ts"] <= inside[others]["ts"] + 1e-3
            assert end(inside[-1]) <= end(bucket) + 1e-3
            waited = sendings[i]["args"]["waited_us"]
            assert sendings[i]["ts"] - ready[i]["ts"] == pytest.approx(waited, abs=0.01)
        for stage in ("encode", "wire", "reduce", "decode"):
            counted = getattr(stats, f"{stage}_s")
            shown = sum(e["dur"] for e in stages if e["name"] == stage) / 1e6
            assert counted <= shown + 1e-6
        backward, late = named(trace, "X", "backward"), named(trace, "X", "communication after backward")
        for step in (0, 1):
            first, last = ready[2 * step], ready[2 * step + 1]
            assert (backward[step]["ts"], end(backward[step])) == pytest.approx((first["ts"], last["ts"]), abs=0.01)
            assert (late[step]["ts"], end(late[step])) == pytest.approx(
                (last["ts"], end(buckets[2 * step + 1])), abs=0.01
            )


def test_a_timeline_changes_nothing_and_stops_by_itself() -> None:
    def run(transport):
        _, plain_stats, plain = train(transport, 3)
        timeline, stats, results = train(transport, 3, steps=2)
        same = all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
        return same, plain_stats.num_stages == stats.num_stages, timeline.to_dict(), stats.num_stages

    for same, counted, trace, num_stages in run_threads(run, 2):
        assert same
        assert counted
        assert trace["otherData"]["steps"] == 2
        assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] in "Xi"} == {0, 1}
        # What is no longer recorded is still counted.
        spans = named(trace, "X", "communication") + named(trace, "X", "sending")
        stages = [e for e in spans if not e["name"].startswith("bucket")]
        assert 3 * len(stages) == 2 * num_stages > 0


def record_ddp(rank: int, path: str) -> dict[str, float]:
    """Three steps of which the first is dense, and one after the recording."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(200, 200) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)
    wire = thinwire.compress(model, "minmax(bits=4)", start=1, skip_if_slower=False)
    with wire.timeline(path, steps=3):
        with pytest.raises(RuntimeError, match="one is being recorded"), wire.timeline(path):
            pass
        for _ in range(4):
            model(torch.randn(8, 200)).square().mean().backward()
    model(torch.randn(8, 200)).square().mean().backward()
    return wire.stats.to_dict()


def test_the_timeline_of_a_ddp_model(tmp_path) -> None:
    answers = run_ranks(record_ddp, 2, str(tmp_path / "trace.json"))
    for rank, stats in enumerate(answers):
        trace = json.loads(rank_path(tmp_path / "trace.json", rank).read_text())
        ready = named(trace, "i", "backward")
        assert trace["otherData"]["steps"] == 3
        assert stats["steps"] == 5
        assert len(ready) > 6
        dense = [(e["args"]["step"], e["args"]["bucket"]) for e in named(trace, "b", "communication")]
        spans = named(trace, "X", "communication")
        sent = named(trace, "X", "sending")
        coded = [(e["args"]["step"], e["args"]["bucket"]) for e in sent if e["name"].startswith("bucket")]
        assert {step for step, _ in dense} == {0}
        assert {step for step, _ in coded} == {1, 2}
        assert [(e["args"]["step"], e["args"]["bucket"]) for e in ready] == sorted(dense) + coded
        assert {e["name"] for e in spans + sent} >= {"encode", "wire", "reduce", "decode"}
        assert len(named(trace, "X", "communication after backward")) == 3
        names = [name for e in sent if e["args"]["step"] == 2 for name in e["args"].get("layers", ())]
        assert sorted(names) == sorted(f"{i}.{kind}" for i in range(6) for kind in ("weight", "bias"))


def test_a_timeline_is_bounded() -> None:
    whole = run_threads(lambda t: train(t, 2, steps=2)[0].to_dict(), 2)[0]
    recorded = sum(e["ph"] in "Xi" and e["name"] not in ("backward", "not hidden") for e in whole["traceEvents"])
    cut = run_threads(lambda t: train(t, 2, steps=2, max_events=7)[0].to_dict(), 2)[0]
    kept = sum(e["ph"] in "Xi" and e["name"] not in ("backward", "not hidden") for e in cut["traceEvents"])
    assert (whole["otherData"]["dropped_events"], kept) == (0, 7)
    assert cut["otherData"]["dropped_events"] == recorded - 7
    for options in ({"steps": 0}, {"max_events": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Timeline(Stats, 0, **options)


def test_a_bucket_that_fails_is_shown_and_the_next_stage_is_not_its() -> None:
    stats = Stats()
    timeline = Timeline(lambda: stats, 0)

    def fails() -> Job:
        with timeline.stage("encode"):
            raise ZeroDivisionError
        yield Then.LATER

    with pytest.raises(ZeroDivisionError):
        next(timeline.bucket(fails(), 4, ["a"], 12))
    encoded_s = stats.encode_s
    with timeline.stage("encode"):
        pass
    assert stats.encode_s > encoded_s > 0
    spans = named(timeline.to_dict(), "X", "sending")
    assert [e["name"] for e in spans] == ["bucket 0", "encode"]


def test_native_all_reduces_may_overlap() -> None:
    timeline = Timeline(Stats, 1, steps=1)
    futures = [torch.futures.Future() for _ in range(3)]
    recorded = [timeline.dense(8, 100 + i, future) for i, future in enumerate(futures)]
    for i in (2, 0, 1):
        thread = threading.Thread(target=futures[i].set_result, args=(torch.full((1,), i),))
        thread.start()
        assert int(recorded[i].wait()) == i
        thread.join()
    of_another_step = torch.futures.Future()
    assert timeline.dense(9, 5, of_another_step) is of_another_step
    trace = timeline.to_dict()
    begins, ends = (named(trace, phase, "communication") for phase in "be")
    assert [e["args"]["bytes"] for e in begins] == [100, 101, 102]
    assert [e["args"]["bytes"] for e in ends] == [102, 100, 101]
    assert len({e["id2"]["local"] for e in begins}) == 3
    assert {e["id2"]["local"] for e in begins} == {e["id2"]["local"] for e in ends}
    assert begins[-1]["ts"] <= ends[0]["ts"]
    (late,) = named(trace, "X", "communication after backward")
    assert end(late) == pytest.approx(ends[-1]["ts"], abs=0.01)


def test_timelines_of_all_ranks_in_one_file(tmp_path) -> None:
    def run(transport):
        path = rank_path(tmp_path / "trace.json", transport.rank)
        train(transport, 1, steps=1)[0].write(path)
        return path

    paths = run_threads(run, 3)
    assert [path.name for path in paths] == ["trace.rank0.json", "trace.rank1.json", "trace.rank2.json"]
    # Rank 1's host says that it began 5 ms later than it did.
    late = json.loads(paths[1].read_text())
    late["otherData"]["origin_unix_ns"] = str(int(late["otherData"]["origin_unix_ns"]) + 5_000_000)
    paths[1].write_text(json.dumps(late))
    merge_timelines(paths, tmp_path / "trace.json")
    merged = json.loads((tmp_path / "trace.json").read_text())
    single = [json.loads(path.read_text()) for path in paths]
    origins = [int(trace["otherData"]["origin_unix_ns"]) for trace in single]
    assert [about["rank"] for about in merged["otherData"]["ranks"]] == [0, 1, 2]
    assert int(merged["otherData"]["origin_unix_ns"]) == min(origins)
    for rank, trace in enumerate(single):
        mine = [e for e in merged["traceEvents"] if e["pid"] == rank + 1]
        moved = [e["ts"] - old["ts"] for e, old in zip(mine, trace["traceEvents"], strict=True)]
        assert moved == pytest.approx([(origins[rank] - min(origins)) / 1000] * len(moved), abs=0.01)
    tracks = {e["tid"]: e["pid"] for e in merged["traceEvents"]}
    assert len(tracks) == 12
    assert min(tracks) > 0


def test_files_that_are_no_timelines_are_refused(tmp_path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    Timeline(Stats, 0).write(good)
    with pytest.raises(ValueError, match=r"of ranks \[0, 0\]"):
        merge_timelines([good, good], tmp_path / "merged.json")
    with pytest.raises(ValueError, match=r"of ranks \[\]"):
        merge_timelines([], tmp_path / "merged.json")
    sound = json.loads(good.read_text())
    broken = [
        "{",
        "[]",
        "{}",
        json.dumps(sound | {"otherData": {"rank": 0}}),
        json.dumps(sound | {"otherData": {"rank": "x", "origin_unix_ns": "1"}}),
        json.dumps(sound | {"traceEvents": [{"ts": "soon"}]}),
        json.dumps(sound | {"traceEvents": [3]}),
        json.dumps(sound | {"traceEvents": None}),
    ]
    for text in broken:
        bad.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json is not the timeline of a rank"):
            merge_timelines([good, bad], tmp_path / "merged.json")
    assert not (tmp_path / "merged.json").exists()
