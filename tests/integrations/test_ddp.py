"""compress() on real DDP models over gloo, from iteration 0 through DDP's bucket rebuild."""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import run_ranks
from nets import DDP_OPTIONS, Net, assert_replicas_identical, batch, fingerprint, loss_of, make, resume, train, trained

# --- it trains -------------------------------------------------------------------------------------------------------


def _trains(rank: int, options: dict) -> tuple[list[float], dict, int]:
    model = make(rank, **options)
    wire = thinwire.compress(model, skip_if_slower=False)
    losses = train(model, rank, 30, lr=0.03)
    assert_replicas_identical(model)
    return losses, wire.stats.to_dict(), wire.wire_bytes_per_step()


@pytest.mark.parametrize("name", DDP_OPTIONS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_trains_and_replicas_stay_identical(name: str, num_ranks: int) -> None:
    for losses, stats, per_step in run_ranks(_trains, num_ranks, DDP_OPTIONS[name]):
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
        assert stats["steps"] == stats["compressed_steps"] == 30
        assert 0 < stats["payload_sent_bytes"] < 0.45 * stats["dense_bytes"]
        assert stats["payload_sent_bytes"] == pytest.approx(30 * per_step, rel=0.1)


def _bytes_are_the_formula(rank: int) -> tuple[int, int]:
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 4)
    wire.reset_stats()
    train(model, rank, 5)
    return wire.stats.payload_sent_bytes, wire.wire_bytes_per_step()


def test_bytes_at_the_transport_are_exactly_the_formula() -> None:
    for sent, per_step in run_ranks(_bytes_are_the_formula, 2):
        assert sent == 5 * per_step


def _gradients(rank: int, spec: str | None, **options) -> list[torch.Tensor]:
    model = make(rank, **options)
    if spec:
        thinwire.compress(model, spec, min_numel=0, skip_if_slower=False)
    for step in range(3):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_are_close_to_the_exact_mean() -> None:
    exact = run_ranks(_gradients, 2, None)[0]
    for spec, bound in (("minmax(bits=8, bucket=128)", 0.02), ("minmax(bits=4, bucket=128)", 0.35)):
        for got, want in zip(run_ranks(_gradients, 2, spec)[0], exact, strict=True):
            assert float((got - want).norm()) <= bound * float(want.norm())


def test_raw_is_bit_identical_to_stock_ddp() -> None:
    for got, want in zip(run_ranks(_gradients, 2, "raw")[1], run_ranks(_gradients, 2, None)[1], strict=True):
        assert torch.equal(got, want)


def _accumulates(rank: int) -> tuple[int, float]:
    model = make(rank)
    wire = thinwire.compress(model, "minmax(bits=8)", skip_if_slower=False)
    for step in range(4):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, batch(rank, 2 * step)).backward()
        loss_of(model, batch(rank, 2 * step + 1)).backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    exact = make(rank)
    with exact.no_sync():
        loss_of(exact, batch(rank, 6)).backward()
    loss_of(exact, batch(rank, 7)).backward()
    want = [p.grad for p in exact.parameters() if p.grad is not None]
    off = sum(float((a - b).norm() ** 2) for a, b in zip(got, want, strict=True)) ** 0.5
    return wire.stats.steps, off / sum(float(b.norm() ** 2) for b in want) ** 0.5


def test_no_sync_accumulation() -> None:
    for steps, relative in run_ranks(_accumulates, 2):
        assert steps == 4
        assert relative < 0.02


def _start(rank: int) -> tuple[list[bool], dict]:
    stock, model = make(rank), make(rank)
    wire = thinwire.compress(model, start=3, skip_if_slower=False)
    same = []
    for step in range(5):
        for m in (stock, model):
            m.zero_grad()
            loss_of(m, batch(rank, step)).backward()
        pairs = zip(stock.parameters(), model.parameters(), strict=True)
        same.append(all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None))
    return same, wire.stats.to_dict()


def test_start_keeps_the_first_steps_dense() -> None:
    for same, stats in run_ranks(_start, 2):
        assert same == [True, True, True, False, False]
        assert (stats["steps"], stats["compressed_steps"]) == (5, 2)


def _sparse(rank: int) -> tuple[bool, str]:
    gradients, said = [], ""
    for options in ({}, {"start": 1}):
        torch.manual_seed(0)
        embedding = nn.EmbeddingBag(200, 64, sparse=True)
        model = DDP(embedding)
        if options:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wire = thinwire.compress(model, skip_if_slower=False, **options)
            said = wire.unsuited["weight"] + "".join(str(warning.message) for warning in caught)
        for _ in range(2):
            embedding.zero_grad()
            model(torch.tensor([[rank, 5, 7 + rank]])).sum().backward()
        assert embedding.weight.grad is not None
        gradients.append(embedding.weight.grad.to_dense())
    return torch.equal(*gradients), said


def test_a_sparse_gradient_stays_raw_and_it_is_said_why() -> None:
    for exact, said in run_ranks(_sparse, 2):
        assert exact
        assert said.startswith("its gradients are sparse (EmbeddingBag(sparse=True)), and are sent as they are")
        assert "nothing is compressed" in said


def _scaler_and_clipping(rank: int) -> tuple[list[float], list[float], float]:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, losses, norm = [], [], 0.0
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(rank, step))
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        before = fingerprint(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        assert (fingerprint(model) == before) == (step == 4)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert_replicas_identical(model)
    return scales, losses, norm


def test_grad_scaler_sees_an_overflow_of_one_rank_on_every_rank() -> None:
    for scales, _, norm in run_ranks(_scaler_and_clipping, 2):
        assert scales == [1024.0] * 4 + [512.0] * 4
        assert 0 < norm < 100


def _reproducible(rank: int, seed: int) -> bytes:
    torch.manual_seed(rank)
    model = make(rank)
    thinwire.compress(model, "minmax(bits=2)", seed=seed, skip_if_slower=False)
    train(model, rank, 6)
    return fingerprint(model)


def test_the_seed_decides_every_bit() -> None:
    first, again, other = (run_ranks(_reproducible, 2, seed)[0] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def _resumes(rank: int) -> tuple[bytes, bytes]:
    def attach(model: DDP, spec: str, **options: int) -> tuple[torch.optim.Optimizer, thinwire.Wire]:
        return torch.optim.Adam(trained(model)), thinwire.compress(model, spec, skip_if_slower=False, **options)

    first, again = partial(attach, spec="minmax(bits=3)", seed=9), partial(attach, spec="minmax(bits=4)")
    return resume(rank, first, again, at=5, steps=9)[:2]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_resume_is_bit_identical(num_ranks: int) -> None:
    for straight, resumed in run_ranks(_resumes, num_ranks):
        assert straight == resumed


def _with_cap(rank: int, cap_mb: float) -> bytes:
    torch.manual_seed(0)
    model = DDP(Net(), bucket_cap_mb=cap_mb)
    thinwire.compress(model, "minmax(bits=3)", skip_if_slower=False)
    train(model, rank, 3)
    return fingerprint(model)


def test_how_ddp_forms_its_buckets_changes_no_bit() -> None:
    assert run_ranks(_with_cap, 3, 0.02)[0] == run_ranks(_with_cap, 3, 10.0)[0]


def _detaches(rank: int) -> bool:
    stock, model = make(rank), make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    loss_of(model, batch(rank, 0)).backward()
    loss_of(stock, batch(rank, 0)).backward()
    wire.detach()
    for m in (stock, model):
        m.zero_grad()
        loss_of(m, batch(rank, 1)).backward()
    pairs = zip(stock.parameters(), model.parameters(), strict=True)
    same = all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
    again = thinwire.compress(model, "minmax(bits=2)", skip_if_slower=False)
    train(model, rank, 3)
    assert again.stats.steps == 3
    assert_replicas_identical(model)
    return same


def test_detach_passes_gradients_through_and_compress_works_again() -> None:
    assert run_ranks(_detaches, 2) == [True, True]


def _in_a_subgroup(rank: int) -> int:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = DDP(Net(), process_group=groups[rank // 2], bucket_cap_mb=0.05)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 4)
    return wire.stats.payload_sent_bytes


def test_models_over_parts_of_the_world() -> None:
    sent = run_ranks(_in_a_subgroup, 4)
    assert len(set(sent)) == 1


def _again_in_a_subgroup(rank: int) -> list[int]:
    group = dist.new_group([0, 1])
    steps: list[int] = []
    for _ in range(3 if rank < 2 else 0):
        torch.manual_seed(0)
        model = DDP(Net(), process_group=group, bucket_cap_mb=0.05)
        wire = thinwire.compress(model, skip_if_slower=False)
        train(model, rank, 2)
        steps.append(wire.stats.steps)
        wire.detach()
    return steps


def test_models_over_a_part_of_the_world_come_and_go() -> None:
    assert run_ranks(_again_in_a_subgroup, 3)[:2] == [[2, 2, 2]] * 2


def _alone(rank: int) -> tuple[int, int]:
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 3)
    return wire.stats.steps, wire.stats.payload_sent_bytes


def test_one_rank_sends_nothing() -> None:
    assert run_ranks(_alone, 1)[0][1] == 0


def _overlaps(rank: int) -> list[str]:
    """The worker runs while backward does: some bucket is handed over after an earlier one was started."""
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 3)
    return [thread.name for thread in threading.enumerate()] + [str(wire.stats.buckets)]


def test_two_worker_threads_a_model() -> None:
    for names in run_ranks(_overlaps, 2):
        assert names.count("thinwire send") == names.count("thinwire receive") == 1
        assert int(names[-1]) > 3


def _one_bucket(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), bucket_cap_mb=100)
    thinwire.compress(model, skip_if_slower=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.randn(2, 1024)).sum().backward()
    return [str(w.message) for w in caught if "bucket_cap_mb" in str(w.message)]


def test_a_model_in_one_bucket_gets_a_warning_with_the_cap_to_set() -> None:
    for messages in run_ranks(_one_bucket, 2):
        assert len(messages) == 1
        assert "bucket_cap_mb=2" in messages[0]


# --- bad input -------------------------------------------------------------------------------------------------------


def _refused(rank: int, what: str) -> str:
    model: nn.Module = make(rank)
    arguments: dict = {}
    if what == "not DDP":
        model = Net()
    elif what == "twice":
        thinwire.compress(model, skip_if_slower=False)
    elif what == "another hook":
        assert isinstance(model, DDP)
        model.register_comm_hook(None, _other_hook)
    elif what == "pattern":
        arguments = {"compressor": {"embedding.*": "minmax"}}
    elif what == "exclude":
        arguments = {"exclude": ["batchnorm"]}
    elif what == "spec":
        arguments = {"compressor": "minmax(bit=4)"}
    elif what == "bits":
        arguments = {"compressor": "minmax(bits=9)"}
    elif what == "unknown":
        arguments = {"compressor": "minmx"}
    elif what == "optimizer":
        arguments = {"optimizer": torch.optim.AdamW(make(rank).parameters())}
    elif what == "dtype":
        model = make(rank, dtype=torch.float64)
        arguments = {"compressor": {"*": "4bit", "embed.weight": "8bit"}}
    elif what == "plans differ":
        arguments = {"compressor": f"minmax(bits={4 + rank})"}
    elif what == "seeds differ":
        arguments = {"seed": rank}
    elif what == "transports differ":
        arguments = {"network": thinwire.Network(transport=("auto", "group")[rank])}
    elif what == "algorithms differ":
        arguments = {"network": thinwire.Network(algorithm=("hierarchical", "sra")[rank])}
    elif what == "simulations differ":
        arguments = {"simulate": rank == 1}
    try:
        thinwire.compress(model, skip_if_slower=False, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _other_hook(state, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "not DDP",
            "TypeError: thinwire.compress() takes a DistributedDataParallel model, or one under fully_shard(), not",
        ),
        ("twice", "RuntimeError: this model is compressed already: call detach()"),
        ("another hook", "RuntimeError: this DDP model has a communication hook already"),
        ("pattern", "ValueError: the pattern 'embedding.*' matches no parameter; close names are embed.weight"),
        ("exclude", "ValueError: the pattern 'batchnorm' matches no parameter"),
        (
            "spec",
            "ValueError: compressor: 'minmax(bit=4)' is not a spec: at character 8, minmax has no parameter 'bit'",
        ),
        ("bits", "ValueError: compressor: bits must be between 1 and 8, not 9"),
        ("unknown", "ValueError: compressor: 'minmx' is not a spec: at character 1, no compressor is called 'minmx'"),
        ("optimizer", "ValueError: optimizer holds no parameter of this model: pass the one that trains it, AdamW(mod"),
        ("dtype", "TypeError: embed.weight: its dtype is torch.float64, and compressors take"),
        (
            "transports differ",
            "DisagreementError: ranks do not agree: rank 0 has 'network.transport: auto', rank 1 has 'net",
        ),
        (
            "algorithms differ",
            "DisagreementError: ranks do not agree: rank 0 has 'network.algorithm: hierarchical(inside",
        ),
        ("simulations differ", "DisagreementError: ranks do not agree: rank 0 has 'simulate: False', rank 1 has 'sim"),
        ("seeds differ", "DisagreementError: ranks do not agree: rank 0 has 'seed: 0', rank 1 has 'seed: 1'"),
        (
            "plans differ",
            "DisagreementError: ranks do not agree: rank 0 has 'compressor: minmax(bits=4, bucket=128)', "
            "rank 1 has 'compressor: minmax(bits=5, bucket=128)'",
        ),
    ],
)
def test_bad_input_is_refused_on_every_rank(what: str, expected: str) -> None:
    for answer in run_ranks(_refused, 2, what):
        assert answer.startswith(expected)


def _worker_error(rank: int, failing: int) -> tuple[str, str, bool]:
    """A compressor that raises on one rank in step 2: everybody hears of it, and training can go on."""
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 2)
    wire.state_dict()
    broken = thinwire.compressors.MinMax.encode
    if rank == failing:

        def explode(self, *args, **kwargs):
            raise ArithmeticError("the abacus broke")

        thinwire.compressors.MinMax.encode = explode
    text = ""
    try:
        loss_of(model, batch(rank, 2)).backward()
    except (ArithmeticError, thinwire.PeerFailedError) as error:
        text = str(error)
    thinwire.compressors.MinMax.encode = broken
    dist.barrier()
    train(model, rank, 2, first=3)
    assert_replicas_identical(model)
    return text, str(wire.stats.steps), True


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_the_worker_reaches_the_loop_and_ddp_stays_usable(failing: int) -> None:
    answers = run_ranks(_worker_error, 2, failing)
    for rank, (text, steps, _) in enumerate(answers):
        assert ("the abacus broke" if rank == failing else f"rank {failing} failed") in text
        assert steps == "5"


def _is_stuck(rank: int) -> tuple[str, float]:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 3)
    if rank == 1:
        time.sleep(12)
        return "", 0.0
    started = time.monotonic()
    try:
        loss_of(model, batch(rank, 3)).backward()
    except thinwire.TransportError as error:
        return str(error), time.monotonic() - started
    return "nothing", 0.0


def test_a_rank_that_is_stuck_is_an_error_within_the_timeout() -> None:
    text, waited = run_ranks(_is_stuck, 2, group_timeout_s=5.0)[0]
    assert "rank 1" in text
    assert waited < 11.0
