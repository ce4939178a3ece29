"""One table of wrong calls: each is refused with the error of its kind, which names what is wrong and what would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire import Checks, Network, ProcessGroupOptions, compress, compress_ddp, compress_fsdp, parse
from thinwire.aggregator import Aggregator, AggregatorAddress, Limits, parse_address
from thinwire.collectives import LoopbackTransport, parse_algorithm, with_shared_memory
from thinwire.compressors import MinMax, for_world
from thinwire.data import Share
from thinwire.local import DiLoCo, Nesterov, preset
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam
from thinwire.pipeline.message import Batch
from thinwire.pipeline.options import PipelineOptions
from thinwire.plan.forecast import Curve
from thinwire.policies import Auto, ByLink, parse_policy
from thinwire.policies.families import family
from thinwire.runtime.engine import WireSettings
from thinwire.store import Centers, Crops, Disk, Memory, RecordFormat
from thinwire_tools import lab
from thinwire_tools.lab.schedule import Event, check_schedule, read_schedule

Wrong = tuple[Any, type[Exception] | tuple[type[Exception], ...], str]
"""What a function is given, the error, and what its message must name."""
X = nn.Parameter(torch.zeros(2))
MODEL = nn.Linear(64, 64)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def calls(function: Callable[..., object], wrong: Sequence[Wrong]) -> list[Any]:
    """Calls with keyword arguments where a dictionary is given, with positional ones for a list, else with one."""
    name = getattr(function, "func", function).__name__
    return [pytest.param(function, *row, id=f"{name}-{str(row[0])[:60]}") for row in wrong]


def policy_family(spec: str, **options: Any) -> object:
    return family(parse(spec), **options)


def sparse_step(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer(embedding.parameters()).step()


def place_check(place: Any, **options: Any) -> None:
    place.check(**options)


def lab_event(kind: Any, text: str) -> Event:
    return Event.parse(kind, text)


def aggregator(*, limits: Mapping[str, Any] | None = None, **options: Any) -> None:
    with Aggregator(limits=Limits(**(limits or {})), **options):
        pass


SPECS: list[Wrong] = [
    ("minmax(", ValueError, "is not a spec"),
    ("minmax + raw", ValueError, "is not a spec"),
    ("__import__('os').system('true')", ValueError, "is not a spec"),
    ("minmax(bits=__import__('os'))", ValueError, "character 13, .* is not a plain value"),
    ("minmax(bits=[1][0])", ValueError, "not a plain value"),
    ("minmax(4, bits=4)", ValueError, "character 11, bits is given twice"),
    ("minmax(4, 128, nearest, 1)", ValueError, "takes 3 parameters by position: it takes bits, bucket, rounding"),
    ("minmax(bit=4)", ValueError, r"character 8, minmax has no parameter 'bit'.*Did you mean 'minmax\(bits=4\)'"),
    ("mnmax", ValueError, "no compressor is called 'mnmax'. Did you mean 'minmax'"),
    ("zzz", ValueError, r"no compressor is called 'zzz'. There are .*minmax.* 'minmax\(bits=4"),
    ("ef(ef(minmax))", TypeError, "has error feedback already"),
    (4, TypeError, r"a compressor must be a string such as 'minmax\(bits=4"),
    *((auto, ValueError, r'auto is no .* alone .*thinwire.compress\(model, "auto"\)') for auto in ("auto", "ef(auto)")),
    ("minmax(bits=0)", ValueError, "bits must be between 1 and 8, not 0"),
    ("minmax(bits=4.0)", TypeError, "bits must be an integer, not 4.0"),
    ("minmax(bucket=0)", ValueError, "bucket must be between 1 and"),
    ("minmax(rounding=up)", ValueError, "rounding must be stochastic or nearest, not 'up'"),
    ("qsgd(bits=1)", ValueError, "bits must be between 2 and 8"),
    ("qsgd(bucket=page)", TypeError, r'bucket \(or "layer"\) must be an integer'),
    ("qsgd(norm=l3)", ValueError, "norm must be l2 or linf"),
    ("gaussian(bits=5)", ValueError, "bits must be 2 or 3 or 4, not 5"),
    ("maxabs(scale=column)", ValueError, "scale must be bucket or row or channel or layer"),
    ("terngrad(clip=-1)", ValueError, "clip must be at least 0 and finite, not -1: .*0 for none"),
    ("shared_terngrad(deviations=-1)", ValueError, "deviations must be at least 0"),
    ("levels(bits=9)", ValueError, "bits must be between 1 and 8"),
    ("levels(learn_at=5)", ValueError, "learn_at must be a tuple"),
    ("rangefloat(bits=16)", ValueError, "bits must be between 3 and 15"),
    ("rangefloat(bits=10, mantissa=2, range=1.0)", ValueError, "mantissa"),
    ("rangefloat(range=0.0)", ValueError, "range must be auto or between"),
    ("truncate(gamma=0.5)", ValueError, "gamma must be at least 1"),
    ("randk(density=2)", ValueError, "density must be above 0 and at most 1, not 2"),
    ("topk(density=0)", ValueError, "density must be above 0 and at most 1, not 0"),
    ("topk(density='a')", TypeError, "density must be a number, not 'a'"),
    ("topk(select=all)", ValueError, "select must be exact or sampled"),
    ("topk(density=((1, 0.25),))", ValueError, "steps ascending from 0"),
    ("globaltopk(density=((1, 0.5),))", ValueError, "density must be like"),
    ("globaltopk(capacity=0.5)", ValueError, "capacity must be at least 1"),
    *((f"chunktopk({given})", ValueError, "must be") for given in ("k=0", "k=65, chunk=64", "average=all")),
    ("threshold(lam=-1)", ValueError, "lam must be at least 0"),
    ("threshold(capacity=0)", ValueError, "capacity must be above 0"),
    ("fft(theta=1.5)", ValueError, "theta must be at least 0 and below 1"),
    *((f"fft(theta={theta})", ValueError, "theta must be") for theta in ("((5, 0.9),)", "((0, 0.9), (0, 0.5))", 1.0)),
    ("fft(theta=growing)", ValueError, "theta must be diminishing, not 'growing'"),
    ("fft(lipschitz=0)", ValueError, "lipschitz must be above 0"),
    ("fft(block=1)", ValueError, r"block \(or whole\) must be at least 2"),
    *((f"fft(bits=10, mantissa={m})", ValueError, f"mantissa={m} does not work with bits=10") for m in range(3)),
    ("powersgd(rank=0)", ValueError, "rank must be at least 1"),
    ("powersgd(rank=((0, 8), (5, 0)))", ValueError, "rank must be at least 1"),
    ("powersgd(rank=1, dtype=fp16)", ValueError, "dtype must be fp32 or bf16, not 'fp16'"),
    ("cast(int8)", ValueError, "to must be bf16 or fp16, not 'int8'"),
    ("dgc(minmax)", TypeError, r"dgc's inner must be a sparsifier such as topk\(density=0.001\), not MinMax"),
    ("dgc(topk, momentum=1)", ValueError, "momentum must be at least 0 and below 1"),
    ("dgc(topk, clip=-1)", ValueError, "clip must be at least 0 .*0 for any"),
    ("ef(minmax, bits=4)", ValueError, "bits of ef must be 8 or 32, not 4"),
    ("ef(minmax, units=seconds)", ValueError, "units must be gradient or update"),
    ("ef(minmax, decay=0)", ValueError, "decay must be above 0 and at most 1"),
    ("minmax | topk", TypeError, "chooses no values"),
    ("topk | randk", TypeError, "chosen values are coded by a quantizer without state"),
    ("topk | ef(minmax)", TypeError, "chosen values are coded by a quantizer without state"),
    ("intsgd(beta=1)", ValueError, "beta must be at least 0 and below 1"),
    ("intsgd(eps=0)", ValueError, "eps must be above 0"),
    ("intsgd(block=class)", ValueError, "block must be layer or global, not 'class'"),
    ("intdiana(bits=2, scale=params)", ValueError, "scale must be gradient, not 'params'"),
    ("intdiana(bits=3)", ValueError, "bits must be 2 or 4 or 8 or 32, not 3"),
    ("heuristic_intsgd(bits=2)", ValueError, "bits must be 8 or 32, not 2"),
]
ALGORITHMS: list[Wrong] = [
    ("star", ValueError, "There are allgather, hierarchical, parameter_server, ring, sra, tree"),
    ("mesh", ValueError, "'mesh' is not a collective algorithm: .*no collective algorithm is called 'mesh'"),
    ("ring(", ValueError, "is not a collective algorithm.*Did you mean 'ring"),
    ("ring(3)", ValueError, "ring takes no parameters"),
    ("ring(bits=3)", ValueError, "ring has no parameter 'bits': it takes none"),
    ("tree(root=-1)", ValueError, "root must be at least 0, not -1: give a rank, or None"),
    ("sra(rates=guessed)", ValueError, "rates must be measured, not 'guessed': or give one for each rank"),
    ("sra(rates=(1, 0))", ValueError, "rates must be at least 1e-15 and at most 1e"),
    (f"sra(rates=({10**400}, 1))", ValueError, "rates must be at least 1e-15 and at most 1e"),
    ("sra(rates=3)", ValueError, "rates must be one for each rank, as"),
    ("hierarchical(across=wires)", ValueError, "across must be slices or leaders"),
    ("hierarchical(inside=topk(density=0.1))", ValueError, "a quantizer without a state"),
    ("hierarchical(inside=minimax)", ValueError, "no compressor is called 'minimax'"),
    ("__import__('os')", ValueError, "no collective algorithm is called '__import__'"),
    (3, ValueError, "must be a string"),
]
POLICIES: list[Wrong] = [
    ("", ValueError, r"is empty. Did you mean 'lgreco\(every=500\)'"),
    ("lgreco(", ValueError, "is not a policy"),
    ("shrink()", ValueError, "no policy is called 'shrink'. There are accordion, auto"),
    ("__import__('os').system('true')", ValueError, "is not a policy"),
    ("lgreco(every=__import__('os'))", ValueError, "not a plain value"),
    ("lgreco(every=2 * 50)", ValueError, "not a plain value"),
    ("lgreco(evry=500)", ValueError, r"no parameter 'evry': it takes every, .*Did you mean 'lgreco\(every=500\)'"),
    ("lgreco(500)", ValueError, "no parameters but by name"),
    ("lgreco(every=1)", ValueError, "every must be at least 2"),
    ("lgreco(every=10.0)", ValueError, "every must be an integer"),
    ("lgreco(every=True)", ValueError, "every must be an integer"),
    ("lgreco(warmup=-1)", ValueError, "warmup must be at least 0"),
    ("lgreco(window=0)", ValueError, "window must be at least 1"),
    ("lgreco(every=10, window=9, lag=5)", ValueError, "do not fit"),
    ("lgreco(error=l1)", ValueError, "error must be"),
    ("lgreco(objective=joy)", ValueError, "objective must be"),
    ("lgreco(alpha=0)", ValueError, "alpha must be above 0"),
    ("lgreco(alpha=1e999)", ValueError, "alpha must be above 0 and finite"),
    ("lgreco(alpha=much)", ValueError, "is not a policy: alpha must be a number, not 'much'"),
    ("lgreco(steps=0)", ValueError, "steps must be at least 1"),
    ("lgreco(steps=10.5)", ValueError, "steps must be an integer"),
    ("lgreco(step=-1, families=('topk',))", ValueError, "step must be above 0"),
    ("lgreco(families=('tpk(density=0.1)',))", ValueError, "is not a spec"),
    ("lgreco(families=('natural',))", ValueError, "no bits, rank, density"),
    ("lgreco(families='topk')", ValueError, "a tuple of specs"),
    ("lgreco(reference='accordion')", ValueError, "reference must be a policy"),
    ("lgreco(reference=topk())", ValueError, "no policy is called 'topk'"),
    ("lgreco(**{'every': 5})", ValueError, r"no parameter '\*\*'"),
    ("kmeans(alpha=-1)", ValueError, "alpha must be above 0"),
    ("kmeans(clusters=0)", ValueError, "clusters must be at least 1"),
    ("accordion(eta=-0.1)", ValueError, "eta must be at least 0"),
    ("accordion(pair=('tpk', 'raw'))", ValueError, "is not a spec"),
    ("accordion(pair=(2, 'raw'))", ValueError, "two numbers, high compression first"),
    ("accordion(pair=4)", ValueError, "two numbers, high compression first"),
    ("accordion(pair=(0, 4))", ValueError, "numbers above 0"),
]
AUTO: list[Wrong] = [
    ({"error": 0.0}, ValueError, "error must be above 0 and below 1"),
    ({"gain": 1.0}, ValueError, "gain must be at least 0 and below 1"),
    ({"candidates": ()}, ValueError, "candidates must be a tuple"),
    ({"candidates": ("minmaxx",)}, ValueError, "Did you mean 'minmax'"),
    ({"candidates": ("minmax(bits=1)", "topk")}, ValueError, r"candidates=.* would offer ef\(minmax\(bits=1"),
    ({"warmup": 3}, ValueError, "warmup=3 must be more than lag=5"),
    ({"algorithms": ()}, ValueError, "algorithms must be a tuple"),
    ({"algorithms": "sra"}, ValueError, "algorithms must be a tuple"),
    ({"algorithms": ("srb",)}, ValueError, "'srb' is not a collective algorithm.*Did you mean 'sra'"),
    ({"algorithms": ("ring",)}, ValueError, "ring among algorithms"),
    ({"algorithms": ("sra(rates=(1, 2))",)}, ValueError, "among algorithms"),
    ({"algorithms": ("hierarchical(across=leaders)",)}, ValueError, "among algorithms"),
]
FAMILIES: list[Wrong] = [
    ({"spec": "natural"}, ValueError, "no bits, rank, density or theta"),
    ({"spec": "fft(theta=((0, 0.9), (10, 0.0)))"}, ValueError, "schedule of its own"),
    ({"spec": "minmax(bits=4)", "bounds": (9, 12)}, ValueError, "no bits between"),
    ({"spec": "minmax(bits=4)", "bounds": (4, 2)}, ValueError, "the lower one first"),
    ({"spec": "topk(density=0.01)", "bounds": (0.0, 0.1)}, ValueError, "above 0"),
    ({"spec": "topk(density=0.01)", "step": 0.0}, ValueError, "step must be above 0"),
    ({"spec": "topk(density=0.01)", "step": -0.1}, ValueError, "step must be above 0"),
]
# In a world of one the arguments are checked as in any other.
COMPRESS: list[Wrong] = [
    ({"compressor": 4}, TypeError, r"compressor must be .*compressor='minmax\(bits=4\)'"),
    ({"compressor": nn.Sequential(nn.ReLU())}, TypeError, "compressor must be .*, not Sequential: "),
    ({"compressor": {"*": 4}}, TypeError, "compressor must be"),
    ({"compressor": {}}, ValueError, r"compressor is an empty mapping.*compressor=\{'\*': '4bit'\}"),
    ({"compressor": {"*": None}}, TypeError, "compressor must be .*, not None"),
    ({"compressor": {"": "4bit"}}, ValueError, r"a pattern is empty: .*'\*' for every layer"),
    ({"compressor": "4bits"}, ValueError, "compressor: .*Did you mean '4bit'"),
    ({"compressor": {3: "raw"}}, TypeError, r"compressor must map name patterns .*compressor=\{"),
    ({"compressor": "minmax(bits=99)"}, ValueError, "compressor: bits must be between 1 and 8"),
    ({"compressor": "minmax(bit=4)"}, ValueError, r"compressor: .*Did you mean 'minmax\(bits=4\)'"),
    ({"compressor": "topk(1%)"}, ValueError, r"compressor: .*Did you mean 'topk\(density=0.01\)'"),
    ({"compressor": MinMax}, TypeError, r"compressor=MinMax\(\), an instance"),
    ({"exclude": "bias"}, TypeError, r"exclude must be .*exclude=\['bn', 'bias'\]"),
    ({"exclude": 3}, TypeError, r"exclude must be .*exclude=\['bn', 'bias'\]"),
    ({"exclude": [""]}, ValueError, "a pattern is empty"),
    ({"exclude": ["nosuch"]}, ValueError, "'nosuch' matches no parameter; close names are"),
    ({"min_numel": -1}, ValueError, r"min_numel must be at least 0.*compress\(model, min_numel=1000\)"),
    ({"start": "abc"}, TypeError, r"start must be an integer.*compress\(model, start=1000\)"),
    ({"seed": 2**64}, ValueError, r"seed must be between.*compress\(model, seed=1000\)"),
    ({"adapt": 3}, TypeError, r"adapt must be .*adapt='lgreco\(every=500\)'"),
    ({"adapt": "lgrec"}, ValueError, "adapt: .*no policy is called 'lgrec'. Did you mean 'lgreco'"),
    ({"optimizer": torch.optim.SGD([X])}, ValueError, r"optimizer holds no parameter of this model: .* SGD\(model.par"),
    ({"optimizer": "adam"}, TypeError, r"optimizer must be .*optimizer=optimizer\)"),
    ({"grad_scaler": 3}, TypeError, r"grad_scaler must be .*grad_scaler=scaler\)"),
    ({"skip_if_slower": 1}, TypeError, r"skip_if_slower must be .*skip_if_slower=False\)"),
    ({"simulate": 1}, TypeError, r"simulate must be .*simulate=False\)"),
    ({"network": "ring"}, TypeError, r"network must be .*network=thinwire.Network\("),
    ({"checks": None}, TypeError, r"checks must be thinwire.Checks, not None"),
    ({"checks": 3}, TypeError, r"checks must be .*checks=thinwire.Checks\("),
    ({"bits": 4}, TypeError, r'thinwire.compress\(model, "minmax\(bits=4\)"\)'),
    ({"rank": 8}, TypeError, r'thinwire.compress\(model, "powersgd\(rank=8\)"\)'),
    ({"ef": True}, TypeError, r'thinwire.compress\(model, "ef\(minmax\(bits=4\)\)"\)'),
    ({"error_feedback": True}, TypeError, r'thinwire.compress\(model, "ef\(minmax\(bits=4\)\)"\)'),
    ({"spec": "4bit"}, TypeError, r"did you mean compressor=\?"),
    ({"warmup": 100}, TypeError, r"did you mean start=\?"),
    ({"algorithm": "ring"}, TypeError, r"compress\(model, network=thinwire.Network\(algorithm='ring'\)\)"),
    ({"parity_every": 3}, TypeError, r"compress\(model, checks=thinwire.Checks\(parity_every=3\)\)"),
    ({"weights": "raw"}, TypeError, r"weights= is an argument of thinwire.compress_fsdp\(\)"),
    ({"excludes": ["bn"]}, TypeError, r"excludes= is not an argument .*did you mean exclude=\?"),
    ({"nosuch": 1}, TypeError, "nosuch= is not an argument .*takes compressor=, exclude="),
]
NO_MODEL: list[Wrong] = [
    ([model], TypeError, r"model must be a torch.nn.Module, not .*model\)\)") for model in (3, None, SGD)
]
NETWORK: list[Wrong] = [
    ({"algorithm": 3}, TypeError, r"algorithm must be text, not 3: Network\(algorithm='ring'\)"),
    ({"algorithm": "mesh"}, ValueError, "'mesh' is not a collective algorithm"),
    ({"transport": "memory"}, ValueError, "transport must be auto or group or shared, not 'memory'"),
    ({"aggregator": 3}, TypeError, r"aggregator must be .*Network\(aggregator='host:5000'\)"),
    ({"aggregator": "nowhere"}, ValueError, "host:port.*nowhere"),
    ({"timeout": 3}, TypeError, r"timeout must be .*Network\(timeout=timedelta\(seconds=60\)\)"),
    ({"timeout": timedelta(seconds=-1)}, ValueError, "timeout must be above 0"),
    ({"streams": 0}, ValueError, r"streams must be between 1 and 64.*Network\(streams=4\)"),
    ({"streams": "4"}, TypeError, r"streams must be .*Network\(streams=4\)"),
]
CHECKS: list[Wrong] = [
    ({"parity_every": -1}, ValueError, r"parity_every must be at least 0, not -1: .*Checks\(parity_every=1000\)"),
    ({"measure_every": 1.0}, TypeError, r"measure_every .*Checks\(measure_every=1000\)"),
    ({"resync_every": "ten"}, TypeError, "resync_every must be an integer, not 'ten'"),
]
SETTINGS: list[Wrong] = [
    ({"start": -1}, ValueError, "start must be at least 0"),
    *(({"seed": seed}, ValueError, "seed must be between 0 and") for seed in (-1, 2**63)),
]
STATELESS = ("topk(density=0.1)", "powersgd", "ef(minmax)", "onebit", "levels", "fft", "sign", "intsgd")
GROUP: list[Wrong] = [
    *((spec, ValueError, r"compressor=.*thinwire\.compress\(model\)") for spec in STATELESS),
    *(({"all_gather": spec}, ValueError, "all_gather=") for spec in STATELESS),
    ({"all_gather": "cast(bf16)"}, ValueError, "summed by an all-reduce"),
    ("fft(theta=((0, 0.9), (5, 0.5)), feedback=False)", ValueError, "follows a schedule"),
    ({"min_numel": -1}, ValueError, "min_numel must be at least 0"),
    ({"exclude": "bias"}, TypeError, r"exclude must be a list of patterns, not 'bias': exclude=\['bias'\]"),
    ({"algorithm": "mesh"}, ValueError, "not a collective algorithm"),
    ({"transport": "mpi"}, ValueError, "transport must be auto or group or shared"),
    ({"where": True}, TypeError, "function of a GroupBuffer"),
]
ADAM: list[Wrong] = [
    ({"lr": -1.0}, ValueError, "lr must be at least 0"),
    ({"lr": "fast"}, TypeError, "lr must be a number, not 'fast'"),
    ({"betas": (0.9, 1.0)}, ValueError, "betas must be at least 0 and below 1, not 1.0"),
    ({"betas": (0.9,)}, ValueError, "betas must be two numbers"),
    ({"eps": -1e-8}, ValueError, "eps must be at least 0"),
    ({"eps": math.inf}, ValueError, "eps must be at least 0 and finite"),
    ({"weight_decay": math.nan}, ValueError, "weight_decay must be at least 0"),
]
PRECONDITIONED: list[Wrong] = [
    *ADAM,
    ({"order": "post"}, ValueError, "order must be pre or update, not 'post'"),
    ({"clip": 0.0}, ValueError, "clip must be above 0"),
]
QUANTIZED: list[Wrong] = [
    *ADAM,
    ({"floor": -1.0}, ValueError, "floor must be at least 0"),
    ({"warmup": 0}, ValueError, 'warmup .or "stable", or None. must be at least 1'),
    ({"warmup": "soon"}, TypeError, "warmup .*must be an integer"),
]
MUON: list[Wrong] = [
    ([nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))], ValueError, "no hidden matrix for Muon"),
    ({"model": nn.Sequential(MODEL, MODEL), "momentum": 1.0}, ValueError, "momentum must be at least 0 and below 1"),
]
NESTEROV: list[Wrong] = [
    *(({"lr": lr}, ValueError, "lr must be above 0 and finite") for lr in (0.0, math.nan, math.inf)),
    *(({"momentum": momentum}, ValueError, "momentum must be at least 0 and below 1") for momentum in (1.0, -0.1)),
]
DILOCO: list[Wrong] = [
    ({"inner_optimizer": torch.optim.SGD([X])}, ValueError, "the inner optimizer does not hold weight"),
    *(
        ({"inner_optimizer": SGD, **options}, error, names)
        for options, error, names in (
            ({"outer": SGD}, TypeError, r"outer must be a thinwire.local.Nesterov\(lr=..., momentum=...\), not"),
            ({"every": 0}, ValueError, "every must be at least 1"),
            ({"every": 10, "fragments": 0}, ValueError, "fragments must be at least 1"),
            ({"every": 10, "fragments": 3}, ValueError, "fragments must divide every"),
            ({"every": 10, "fragments": 5, "overlap": 2}, ValueError, "overlap must be below"),
            ({"every": 4, "fragments": 4}, ValueError, "fragments must be between 1 and 2"),
            ({"mix": 1.5}, ValueError, r"mix \(or 'keep'\) must be at least 0 and at most 1"),
            ({"mix": "drop"}, TypeError, r"mix \(or 'keep'\) must be a number, not 'drop'"),
            ({"compressor": "minmax(bits=99)"}, ValueError, "bits must be between"),
        )
    ),
]
PIPELINE: list[Wrong] = [
    ({"forward": "delta(minmax(bits=9))"}, ValueError, "bits must be between"),
    ({"forward": "delta(ef(maxabs))"}, TypeError, "cannot code activations"),
    ({"forward": "delta(delta(maxabs))"}, TypeError, "cannot code activations"),
    ({"forward": "direct(powersgd)"}, TypeError, "cannot code activations"),
    ({"forward": "threshold(lam=1.0)"}, ValueError, "must know the size of a message"),
    ({"forward": []}, ValueError, "no compressor is given"),
    ({"backward": "delta(maxabs(bits=4))"}, ValueError, "only activations on their way forward"),
    ({"evaluation": "delta(maxabs(bits=4))"}, ValueError, "only activations on their way forward"),
    ({"precision": 12}, ValueError, "precision must be 32, 16 or 2 to 8"),
    ({"check_every": 0}, ValueError, "check_every must be at least 1"),
    ({"max_length": 0}, ValueError, "max_length must be at least 1"),
    ({"warmup_epochs": -1}, ValueError, "warmup_epochs must be at least 0"),
    ({"forward": "maxabs(bits=4)", "warmup_epochs": 1}, ValueError, "counts visits of samples"),
    ({"store": "memory"}, TypeError, "store must be a thinwire.store.Memory"),
    ({"store": Centers(), "precision": 8}, ValueError, "cluster centers are kept in 32 bits"),
    ({"store": Centers(), "warmup_epochs": 1}, ValueError, "which cluster centers do not know"),
    ({"adapt": "lgreco"}, TypeError, "adapt must be thinwire.policies.ByLink"),
    ({"adapt": ByLink(forward=["maxabs(bits=3)"])}, ValueError, "or nowhere"),
    ({"forward": "maxabs(bits=3)", "adapt": ByLink()}, ValueError, "or nowhere"),
    ({"adapt": ByLink(backward=["delta(maxabs(bits=3))"])}, ValueError, "only activations"),
]
BY_LINK: list[Wrong] = [
    ({"forward": "delta(maxabs(bits=3))"}, ValueError, "forward must be a list"),
    ({"backward": []}, ValueError, "backward must be a list"),
    ({"after": 0}, ValueError, "after must be at least 1"),
    ({"every": 0}, ValueError, "every must be at least 1"),
]
TENSOR_PARALLEL: list[Wrong] = [
    ({"compressor": "powersgd"}, TypeError, "cannot code activations"),
    ({"compressor": "delta(ef(maxabs))"}, TypeError, "cannot code activations"),
    ({"store": Centers()}, TypeError, "store must be thinwire.store.Memory"),
]
BATCH: list[Wrong] = [
    ([[1, 2, 1], None, None, ()], ValueError, "sample 1 is in the batch twice"),
    ([[1, -2], None, None, ()], ValueError, "sample ids must be between 0 and"),
    ([[2**62], None, None, ()], ValueError, "sample ids must be between 0 and"),
    ([[], None, None, ()], ValueError, "at least one sample id"),
    ([[1.5], None, None, ()], TypeError, "sample ids must be an integer, not 1.5"),
    ([[True], None, None, ()], TypeError, "must be an integer"),
    ([torch.tensor([1.0, 2.0]), None, None, ()], TypeError, "must be an integer"),
    ([[1, 2], None, [3], ()], ValueError, "1 lengths are given for 2 samples"),
    ([[1, 2], 4, [3, 5], ()], ValueError, "5 positions, in a batch padded to 4"),
    ([[1, 2], 0, None, ()], ValueError, "length must be at least 1"),
    ([[1, 2], None, None, [-1]], ValueError, "upcoming ids must be between"),
    *(
        ([[1, 2], None, None, (), corners], ValueError, "corners are 2 pairs")
        for corners in ([(0, 1)], [(0, 1), (0,)], [(0, 1, 2), (0, 1, 2)])
    ),
    ([[1], None, None, (), torch.tensor([[0, -1]])], ValueError, "corners must be between 0"),
]
CENTERS: list[Wrong] = [
    *(({"num": num}, ValueError, "num must be between 1 and 256") for num in (0, 257)),
    ({"window": 0}, ValueError, "window must be at least 1"),
]
MEMORY: list[Wrong] = [
    ({"num_samples": 0}, ValueError, "num_samples must be at least 1"),
    ({"budget_bytes": -1}, ValueError, "budget_bytes must be at least 1"),
    ({"evict": "all"}, ValueError, "evict must be newcomers or oldest"),
]
DISK: list[Wrong] = [
    ({}, ValueError, "num_samples= or budget_bytes="),
    ({"num_samples": 1, "snapshots": -1}, ValueError, "snapshots must be at least 0"),
    ({"num_samples": 1, "waiting_bytes": 0}, ValueError, "waiting_bytes must be at least 1"),
]
RATES: list[Wrong] = [
    *(
        (text, ValueError, r"as in 100mbit or 2\.5gbit")
        for text in ("", "100", "mbit", "100mb", "100mbit/s", "-1mbit", "1e3mbit", "1gbit,1gbit", "nanmbit")
    ),
    *((text, ValueError, "too slow") for text in ("0mbit", "10bit")),
    *((text, ValueError, "too fast") for text in ("1001tbit", "9" * 400 + "gbit")),
]
TIMES: list[Wrong] = [
    *((text, ValueError, "as in 20ms") for text in ("", "20", "ms", "20min", "-1ms")),
    *((text, ValueError, "too long") for text in ("3601s", "9" * 400 + "s")),
]
EVENTS: list[Wrong] = [
    (["kill", "1"], ValueError, "1"),
    (["kill", "1@2s..3s"], ValueError, r"1@2s\.\.3s"),
    (["pause", "1@2s"], ValueError, "1@2s"),
    (["cut", "1@3s..2s"], ValueError, r"1@3s\.\.2s"),
    (["join", "a@1s"], ValueError, "a@1s"),
]
SCHEDULES: list[Wrong] = [
    ([[line]], ValueError, line.split()[-1]) for line in ("explode 1@60s", "kill", "kill one@60s")
]
KILL, AGAIN = Event("kill", 0, 1.0), Event("join", 0, 2.0)
ORDERS: list[Wrong] = [
    ([[Event("kill", 2, 1.0)], 2], ValueError, "rank 2: there are ranks 0 to 1"),
    ([[KILL, AGAIN, Event("join", 0, 4.0)], 2], ValueError, "rank 0 joins at 4 s, and runs already"),
    ([[KILL, Event("pause", 0, 2.0, 3.0)], 2], ValueError, "rank 0 at 2 s, when it does not run"),
]
LAUNCH: list[Wrong] = [
    ({"timeout": math.nan}, ValueError, "timeout must be a positive number of seconds, not nan"),
    ({"timeout": -1.0}, ValueError, "timeout must be a positive number"),
    ({"burst_bytes": -5}, ValueError, "burst_bytes must be between 1 and"),
    ({"burst_bytes": 10**12}, ValueError, "burst_bytes must be between 1 and"),
    *(
        ({"count": count, "possible": possible}, ValueError, "count")
        for count, possible in (("tokens", None), (r"(\d+)", 0.0), (None, 5.0), (r"(\d)(\d)", 1.0))
    ),
]
AGGREGATOR: list[Wrong] = [
    *(({"port": port}, ValueError, "port must be between 0 and 65535") for port in (99999, -1)),
    *(({"limits": {"join_timeout_s": x}}, ValueError, "join_timeout_s must be above 0") for x in (math.nan, -1.0)),
    ({"limits": {"idle_timeout_s": math.inf}}, ValueError, "idle_timeout_s must be above 0 and finite"),
    ({"limits": {"shares": 0}}, ValueError, "shares must be at least 1"),
]
WRONG = [
    *calls(parse, SPECS),
    *calls(parse_algorithm, ALGORITHMS),
    *calls(parse_policy, POLICIES),
    *calls(Auto, AUTO),
    *calls(policy_family, FAMILIES),
    *calls(partial(compress, MODEL), COMPRESS),
    *(call for function in (compress, compress_ddp, compress_fsdp) for call in calls(function, NO_MODEL)),
    *calls(Network, NETWORK),
    *calls(Checks, CHECKS),
    *calls(WireSettings, SETTINGS),
    *calls(ProcessGroupOptions, GROUP),
    *calls(partial(CompressedAdamW, [X]), PRECONDITIONED),
    *calls(partial(QuantizedAdam, [X]), QUANTIZED),
    *calls(Muon, MUON),
    *calls(
        sparse_step,
        [([CompressedAdamW], TypeError, "sparse=False"), ([QuantizedAdam], TypeError, "make the embedding dense")],
    ),
    *calls(Nesterov, NESTEROV),
    *calls(partial(DiLoCo, MODEL), DILOCO),
    *calls(preset, [("dilco", ValueError, "preset must be .*streaming.*, not 'dilco'")]),
    *calls(PipelineOptions, PIPELINE),
    *calls(ByLink, BY_LINK),
    *calls(thinwire.CompressedRowwiseParallel, TENSOR_PARALLEL),
    *calls(thinwire.compress_stage, [([MODEL], TypeError, r"compress_stage\(\) takes a .*PipelineStage, not Linear")]),
    *calls(Batch.from_ids, BATCH),
    *calls(Centers, CENTERS),
    *calls(Memory, MEMORY),
    *calls(partial(Disk, "somewhere"), DISK),
    *calls(partial(RecordFormat, ()), [([p], ValueError, "precision must be") for p in (1, 9, 17, 31, 64, 0)]),
    *calls(Crops, [({"size": 0, "padding": 1}, ValueError, "size must be at least 1")]),
    *calls(
        partial(place_check, Crops(size=8, padding=2)),
        [({"precision": 8, "warmup_epochs": 0}, ValueError, "give 16 or 32")],
    ),
    *calls(
        partial(Share, range(2)),
        [([2, 2], ValueError, "replica must be between 0 and 1"), ([0, 3], ValueError, "cannot be shared by 3 repl")],
    ),
    *calls(Curve, [([p], ValueError, "ascending") for p in ((), ((2.0, 0.1), (1.0, 0.2)), ((1.0, -0.1),))]),
    *calls(lab.parse_rate, RATES),
    *calls(lab.parse_time, TIMES),
    *calls(lab_event, EVENTS),
    *calls(read_schedule, SCHEDULES),
    *calls(check_schedule, ORDERS),
    *calls(partial(lab.launch, ["true"], num_ranks=1), LAUNCH),
    *calls(aggregator, AGGREGATOR),
    *calls(
        parse_address,
        [
            (text, ValueError, "host:port")
            for text in ("host", "host:", ":1", "host:99999", "host:x", "host:1?slots", "host:1?rate=3")
        ],
    ),
    *calls(
        AggregatorAddress,
        [
            ({"address": "host"}, ValueError, "host:port"),
            ({"address": "host:80", "token": b"x"}, TypeError, "token must be text"),
            ({"address": "host:80", "tls": True}, TypeError, r"tls must be an ssl\.SSLContext, not True"),
        ],
    ),
    *calls(
        partial(with_shared_memory, LoopbackTransport.world(2)[0], timedelta(seconds=1)),
        [("memory", ValueError, "transport must be auto or group or shared")],
    ),
    *calls(
        partial(for_world, parse("delta(maxabs(bits=3))")),
        [([2, 1000], ValueError, r"for the activations of a pipeline \(thinwire\.compress_stage\)")],
    ),
    *(
        call
        for spec in ("intsgd", "heuristic_intsgd")
        for call in calls(
            partial(for_world, parse(f"{spec}(bits=8)")),
            [([128, 1000], ValueError, rf"cannot serve 128 ranks.*Take {spec}\(bits=32\)")],
        )
    ),
]


@pytest.mark.parametrize(("function", "given", "error", "names"), WRONG)
def test_a_wrong_call_is_refused_with_what_is_wrong(
    function: Callable[..., object], given: Any, error: type[Exception], names: str
) -> None:
    arguments, options = ([], given) if isinstance(given, dict) else (given if isinstance(given, list) else [given], {})
    with pytest.raises(error, match=names):
        function(*arguments, **options)


def test_a_launched_rank_that_forgot_to_join_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match=r"not Linear: wrap it first, .*DistributedDataParallel\(model\)"):
        thinwire.compress(nn.Linear(64, 64))
    with pytest.raises(TypeError, match=r"unwrap it first: model.module, then .*DistributedDataParallel\(model.mod"):
        thinwire.compress(nn.DataParallel(nn.Linear(64, 64)))
