"""compress() the way of a device, with CPU tensors over gloo: bit for bit what the CPU's own way does."""

from __future__ import annotations

import io

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


def both(run, num_ranks: int, *args) -> list[dict]:
    """A run on either way; they must end alike."""
    there, here = (run_ranks(run, num_ranks, as_device, *args) for as_device in (True, False))
    for mine, theirs in zip(there, here, strict=True):
        for key, value in theirs.items():
            assert mine[key] == value, key
    return there


def _trains(rank: int, as_device: bool, rules, options: dict) -> dict:
    model = make(rank, **options)
    wire = attach(model, rules, as_device, start=1)
    train(model, rank, 6)
    assert_replicas_identical(model)
    assert (wire.device is not None) == as_device
    return digest(model, wire)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("rules", ["minmax(bits=4)", "intdiana(bits=2)", MIXED], ids=["minmax", "intdiana", "mixed"])
def test_training_ends_with_the_same_bits(rules, num_ranks: int) -> None:
    both(_trains, num_ranks, rules, {})


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"unused": True},
                                     {"dtype": torch.bfloat16}], ids=str)  # fmt: skip
def test_every_way_that_ddp_has(options: dict) -> None:
    both(_trains, 2, "ef(minmax(bits=3))", options)


def _saturates(rank: int, as_device: bool) -> dict:
    model = make(rank)
    rules = {"layers.0*": "rangefloat(bits=8, range=0.0001)", "*": "threshold(lam=1e-4, capacity=0.01)"}
    wire = attach(model, rules, as_device)
    train(model, rank, 4)
    return digest(model, wire)


def test_what_saturates_or_finds_no_room_is_counted() -> None:
    for found in both(_saturates, 2):
        assert min(found["saturated"]) > 0


def _overflows(rank: int, as_device: bool, spec: str) -> dict:
    """With an Inf in step 2 of rank 1 the scaler skips on every rank, and no residual moves."""
    model = make(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    wire = attach(model, spec, as_device, grad_scaler=scaler)
    optimizer = torch.optim.SGD(trained(model), lr=0.03)
    for step in range(5):
        before, weights = wire.state_dict(), fingerprint(model)
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = wire.state_dict()
        moved = [key for key in before if "residual" in key and not torch.equal(before[key], after[key])]
        assert (fingerprint(model) != weights) == (step != 2)
        assert bool(moved) == (step != 2)
    return digest(model, wire)


@pytest.mark.parametrize("spec", ["ef(minmax(bits=2))", "ef(topk(density=0.1))", "ef(randk(density=0.1))"])
def test_no_slot_moves_in_a_step_that_is_not_finite(spec: str) -> None:
    for found in both(_overflows, 2, spec):
        assert found["counts"][2] == 1


def _resumes(rank: int, as_device: bool, spec: str) -> dict:
    def run(model, optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()

    def new() -> tuple:
        model = make(rank)
        return model, torch.optim.SGD(trained(model), lr=0.1), attach(model, spec, as_device)

    model, optimizer, wire = new()
    run(model, optimizer, 0, 3)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "wire": wire.state_dict()}, buffer)
    run(model, optimizer, 3, 6)
    straight = digest(model, wire)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    model, optimizer, wire = new()
    model.load_state_dict(state["model"])
    wire.load_state_dict(state["wire"])
    run(model, optimizer, 3, 6)
    resumed = digest(model, wire)
    assert (straight["weights"], straight["slots"]) == (resumed["weights"], resumed["slots"])
    return resumed


def test_a_checkpoint_resumes_bit_for_bit() -> None:
    both(_resumes, 2, "ef(minmax(bits=2))")


def _guarded(rank: int, as_device: bool) -> dict:
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
    return {**digest(model, wire), "alpha": stats.alpha}


def test_checks_and_repairs() -> None:
    for found in both(_guarded, 2):
        assert [step for step, _ in found["alpha"]] == [0, 3]


def _differs(rank: int, as_device: bool) -> dict:
    model = make(rank)
    wire = attach(model, "minmax(bits=4)", as_device, checks=thinwire.Checks(1))
    train(model, rank, 2)
    with torch.no_grad():
        model.module.norm.weight.add_(float(rank == 1))
    with pytest.raises(RuntimeError, match=r"norm\.weight of rank 1 is not that of rank 0"):
        train(model, rank, 1, first=2)
    return {"steps": wire.stats.steps}


def test_replicas_that_differ_are_an_error_on_every_rank() -> None:
    both(_differs, 2)


def _disagrees(rank: int, as_device: bool) -> dict:
    with pytest.raises(thinwire.DisagreementError, match="rank 1"):
        attach(make(rank), f"minmax(bits={4 + rank})", as_device)
    return {}


def test_ranks_must_have_one_plan() -> None:
    both(_disagrees, 2)


def _learns(rank: int, as_device: bool) -> dict:
    model = make(rank)
    wire = attach(model, "levels(bits=3, learn_at=(0, 2), min_numel=0)", as_device)
    train(model, rank, 4)
    return digest(model, wire)


def test_what_one_rank_learns_reaches_all() -> None:
    both(_learns, 2)


def _counts(rank: int) -> tuple[int, int, list[str]]:
    import threading

    model = make(rank)
    wire = attach(model, MIXED, True)
    train(model, rank, 4)
    wire.reset_stats()
    train(model, rank, 5)
    names = [thread.name for thread in threading.enumerate()]
    assert wire.stats.buffer_bytes > 0
    return wire.stats.payload_sent_bytes, wire.wire_bytes_per_step(), names


def test_bytes_are_the_formula_and_no_thread_communicates() -> None:
    for sent, per_step, names in run_ranks(_counts, 2):
        assert sent == 5 * per_step
        assert [name for name in names if "thinwire" in name] == ["thinwire failures"]


def _detaches(rank: int) -> bool:
    model = make(rank)
    wire = attach(model, "minmax", True)
    train(model, rank, 2)
    wire.detach()
    train(model, rank, 2, first=2)
    again = attach(model, "ef(minmax(bits=2))", True)
    train(model, rank, 2, first=4)
    assert_replicas_identical(model)
    return again.stats.steps == 2


def test_detach_and_compress_again() -> None:
    assert run_ranks(_detaches, 2) == [True, True]


def _backward_inside_autocast(rank: int, as_device: bool) -> dict:
    model = make(rank)
    wire = attach(model, "powersgd(rank=2)", as_device)
    for step in range(3):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch(rank, step)).backward()
    return digest(model, wire)


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
    for option in ({"algorithm": "ring"}, {"transport": "shared"}, {"aggregator": "localhost:1"}):
        with pytest.raises(ValueError) as raised:
            attach(make(rank), "intsgd", True, network=thinwire.Network(**option))
        texts.append(str(raised.value))
    return texts


def test_ways_of_the_host_are_refused() -> None:
    for ring, shared, aggregator in run_ranks(_refuses, 2):
        assert "between devices there are sra" in ring
        assert "memory of the host" in shared
        assert "between devices NCCL adds them" in aggregator


def _times(rank: int) -> str:
    with pytest.raises(ValueError) as raised:
        attach(make(rank), "minmax", True, adapt="lgreco(objective=time)")
    return str(raised.value)


def test_a_policy_that_goes_by_the_clock_of_the_host_is_refused() -> None:
    for text in run_ranks(_times, 2):
        assert "on the host's clock, which a GPU's does not show" in text


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


@pytest.mark.parametrize("devices", [{GPU: "a", OTHER: "b"}, {torch.device("cpu"): "a", GPU: "b"},
                                     {torch.device("mps"): "a"}], ids=str)  # fmt: skip
def test_models_elsewhere_are_refused(devices: dict) -> None:
    with pytest.raises(NotImplementedError, match="all on one CUDA device"):
        check_device(devices, "cuda:nccl")


def test_another_backend_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"has cpu:gloo,cuda:gloo: call init_process_group\('nccl'\)"):
        check_device({GPU: "w"}, "cpu:gloo,cuda:gloo")


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.integrations.devices.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        check_device({GPU: "w"}, "cuda:nccl")
