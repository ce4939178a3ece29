"""``python -m experiments``: repeat the papers, and validate thinwire. Run it from a clone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from thinwire_tools.cli import Command, Program

_PAPERS = {
    "all": Command("experiments.framework.everything:repro_all", "every paper in turn, and one page of all claims"),
    "fft": Command("experiments.papers.fft.paper:fft", "the FFT sparsification paper's figures"),
    "cgx": Command("experiments.papers.cgx.paper:cgx", "the thesis's chapter on CGX"),
    "intsgd": Command("experiments.papers.intsgd.paper:intsgd", "the IntSGD paper: integers on the network"),
    "lgreco": Command("experiments.papers.lgreco.paper:lgreco", "the thesis's chapter on L-GreCo, layer by layer"),
    "qsdp": Command("experiments.papers.qsdp.paper:qsdp", "the thesis's chapter on QSDP: FSDP with few bits"),
    "aqsgd": Command("experiments.papers.aqsgd.paper:aqsgd", "the AQ-SGD paper: pipelines over slow links"),
    "fullstack": Command("experiments.papers.aqsgd.stack_paper:fullstack", "pipelines in replicas, split learning"),
}
_VALIDATION = {
    "bench algorithms": Command("experiments.bench.algorithms:algorithms", "every collective algorithm, many links"),
    "bench growth": Command("experiments.bench.growth:growth", "steps, start and memory by ranks and size of models"),
    "bench doctor": Command("experiments.bench.doctor:doctor", "predicted steps beside measured steps, eight links"),
    "bench local": Command("experiments.bench.local:local", "local updates over slow links, beside a free network"),
    "bench pipelines": Command("experiments.bench.pipelines:pipelines", "steps of pipelines over slow links"),
    "bench optimizer": Command("experiments.bench.optimizer:optimizer", "what an optimizer's step costs"),
    "bench instrument": Command("experiments.bench.instrument:instrument", "replayed steps beside computed ones"),
    "bench gpu": Command("experiments.bench.gpu:gpu", "bytes and launches of a GPU's kernels, counted without one"),
    "bench training": Command("experiments.bench.training:training", "loss and bytes of each way to train"),
    "chaos": Command("experiments.validation.chaos:chaos", "ranks that fail in seeded ways, and the others' errors"),
    "conformance": Command("experiments.validation.conformance:conformance", "PyTorch's own tests of process groups"),
    "fuzz": Command("experiments.validation.fuzz:fuzz", "very many damaged messages, which decoders must survive"),
    "soak": Command("experiments.validation.soak:soak", "a very long training: memory, threads, files, replicas"),
    "bench compressors": Command("experiments.bench.compressors:compressors", "error, bytes, speed of each compressor"),
}
EXPERIMENTS = Program(
    "python -m experiments",
    "repeat the papers' experiments, and validate thinwire.",
    {"Papers": _PAPERS, "Validation": _VALIDATION},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    return EXPERIMENTS.run(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
