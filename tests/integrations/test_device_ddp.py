"""compress() the way of a device, with CPU tensors over gloo: bit for bit what the CPU's own way does."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch, fingerprint, loss_of, make, train, trained
from thinwire.integrations.ddp import Options, attach_ddp
from thinwire.integrations.devices import check_device
from thinwire.runtime.executor import StreamExecutor

MIXED = {
    "embed*": "ef(topk(density=0.1))",
    "layers.0*": "ef(minmax(bits=2))",
    "layers.1*": "cast(bf16)",
    "layers.2*": "rangefloat(bits=8)",
    "layers.3*": "ef(randk(density=0.2))",
    "norm.weight": "maxabs(bits=4)",
}


def attach(model, compressor, as_device: bool, **options) -> thinwire.Wire:
    return attach_ddp(model, Options(compressor=compressor, skip_if_slower=False, as_device=as_device, **options))


def digest(model: nn.Module, wire: thinwire.Wire) -> dict:
    """All that must not depend on the way: weights, slots, and what was counted of the values."""
    stats = wire.stats
    return {
        "weights": fingerprint(model),
        "slots": {key: value.tolist() for key, value in wire.state_dict().items()},
        "counts": (stats.steps, stats.compressed_steps, stats.nonfinite_steps, stats.dense_bytes, stats.encoded),
        "saturated": (stats.saturated, stats.overflowed),
    }


def both(run, num_ranks: int, *args) -> list:
    """What a run finds on the way of a device, which must be what it finds on the host's."""
    there, here = (run_ranks(run, num_ranks, as_device, *args) for as_device in (True, False))
    assert list(map(_told, there)) == list(map(_told, here))
    return there


def _told(found) -> dict:
    """By case and key: of what differs a failed comparison says which."""
    return {(case, key): value for case, values in found.items() for key, value in values.items()}


def _trains(rank: int, as_device: bool, cases: dict) -> dict[str, dict]:
    found = {}
    for name, (rules, options) in cases.items():
        model = make(rank, **options)
        wire = attach(model, rules, as_device, start=1)
        train(model, rank, 5)
        assert_replicas_identical(model)
        assert (wire.device is not None) == as_device
        found[name] = digest(model, wire)
        wire.detach()
    return found


LIMITED = {"layers.0*": "rangefloat(bits=8, range=0.0001)", "*": "threshold(lam=1e-4, capacity=0.01)"}
RULES = {
    "minmax": ("minmax(bits=4)", {}),
    "intdiana": ("intdiana(bits=2)", {}),
    "mixed": (MIXED, {}),
    "learned by one rank": ("levels(bits=3, learn_at=(0, 2), min_numel=0)", {}),
    "saturated": (LIMITED, {}),
    "bucket view": ("ef(minmax(bits=3))", {"gradient_as_bucket_view": True}),
    "static graph": ("ef(minmax(bits=3))", {"static_graph": True}),
    "unused": ("ef(minmax(bits=3))", {"unused": True}),
    "bf16": ("ef(minmax(bits=3))", {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize(("num_ranks", "names"), [(2, ["mixed"]), (3, list(RULES)), (4, ["mixed"])], ids=[2, 3, 4])
def test_training_ends_with_the_same_bits(num_ranks: int, names: list[str]) -> None:
    for found in both(_trains, num_ranks, {name: RULES[name] for name in names}):
        # What saturates or finds no room is counted.
        assert all(min(found[name]["saturated"]) > 0 for name in names if name == "saturated")


def _guarded(rank: int, as_device: bool) -> dict[str, dict]:
    """Parity, resynchronisation, measuring, and other options that are rarely at work."""
    model = make(rank)
    wire = attach(model, "minmax(bits=4)", as_device, checks=thinwire.Checks(2, resync_every=2, measure_every=3))
    train(model, rank, 5)
    with torch.no_grad():
        next(iter(trained(model))).add_(float(rank == 1))
    train(model, rank, 2, first=5)  # resync repairs it
    assert_replicas_identical(model)
    stats = wire.stats
    assert stats.parity_checks == 4
    assert stats.resyncs == 3
    return {"checked": {**digest(model, wire), "alpha": stats.alpha}}


def test_checks_and_repairs() -> None:
    for found in both(_guarded, 2):
        assert [step for step, _ in found["checked"]["alpha"]] == [0, 3]


def _differs(rank: int, as_device: bool) -> dict[str, dict]:
    model = make(rank)
    wire = attach(model, "minmax(bits=4)", as_device, checks=thinwire.Checks(1))
    train(model, rank, 2)
    with torch.no_grad():
        model.module.norm.weight.add_(float(rank == 1))
    with pytest.raises(RuntimeError, match=r"norm\.weight of rank 1 is not that of rank 0"):
        train(model, rank, 1, first=2)
    with pytest.raises(thinwire.DisagreementError, match="rank 1"):
        attach(make(rank), f"minmax(bits={4 + rank})", as_device)
    return {"parity": {"steps": wire.stats.steps}}


def test_replicas_and_plans_that_differ_are_an_error_on_every_rank() -> None:
    both(_differs, 2)


def _threads(rank: int) -> list[str]:
    model = make(rank)
    wire = attach(model, MIXED, True)
    train(model, rank, 2)
    assert wire.stats.buffer_bytes > 0
    return [thread.name for thread in threading.enumerate() if "thinwire" in thread.name]


def test_no_thread_communicates() -> None:
    assert run_ranks(_threads, 2) == [["thinwire failures"]] * 2


def _backward_inside_autocast(rank: int, as_device: bool) -> dict[str, dict]:
    model = make(rank)
    wire = attach(model, "powersgd(rank=2)", as_device)
    for step in range(3):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch(rank, step)).backward()
    return {"autocast": digest(model, wire)}


def test_autocast_does_not_reach_what_compresses() -> None:
    both(_backward_inside_autocast, 2)


def _measures(rank: int) -> tuple[dict, float, str]:
    model = make(rank)
    network = thinwire.Network(algorithm="sra(rates=measured)")
    wire = attach_ddp(model, Options(compressor="minmax(bits=4)", as_device=True, network=network))
    train(model, rank, 2)
    assert wire.speeds is not None
    return wire.declined, wire.speeds.bandwidth, str(wire.algorithm)


def test_links_and_codecs_are_measured() -> None:
    answers = run_ranks(_measures, 2)
    assert answers[0] == answers[1]
    assert answers[0][1] > 0
    assert "rates=(" in answers[0][2]


def _refuses(rank: int) -> list[str]:
    texts = []
    wrong = [{"network": thinwire.Network(algorithm="ring")}, {"network": thinwire.Network(transport="shared")}]
    wrong += [{"network": thinwire.Network(aggregator="localhost:1")}, {"adapt": "lgreco(objective=time)"}]
    for options in wrong:
        with pytest.raises(ValueError) as raised:
            attach(make(rank), "intsgd" if "network" in options else "minmax", True, **options)
        texts.append(str(raised.value))
    return texts


def test_ways_of_the_host_are_refused() -> None:
    for ring, shared, aggregator, timed in run_ranks(_refuses, 2):
        assert "between devices there are sra" in ring
        assert "memory of the host" in shared
        assert "between devices NCCL adds them" in aggregator
        assert "on the host's clock, which a GPU's does not show" in timed


# --- what compress() says of devices ---------------------------------------------------------------------------------


def test_a_default_device_does_not_reach_the_hosts_own_tensors() -> None:
    seen = []
    with torch.device("meta"):
        StreamExecutor(torch.device("cpu")).call(lambda: seen.append(torch.zeros(1).device.type))
    assert seen == ["cpu"]


GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


def test_a_model_on_one_gpu_over_nccl_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.integrations.devices.find_spec", lambda name: object())
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        assert check_device({GPU: "w"}, backends) == GPU


def test_models_elsewhere_other_backends_and_a_missing_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in ({GPU: "a", OTHER: "b"}, {torch.device("cpu"): "a", GPU: "b"}, {torch.device("mps"): "a"}):
        with pytest.raises(NotImplementedError, match="all on one CUDA device"):
            check_device(devices, "cuda:nccl")
    with pytest.raises(RuntimeError, match=r"has cpu:gloo,cuda:gloo: call init_process_group\('nccl'\)"):
        check_device({GPU: "w"}, "cpu:gloo,cuda:gloo")
    monkeypatch.setattr("thinwire.integrations.devices.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        check_device({GPU: "w"}, "cuda:nccl")
