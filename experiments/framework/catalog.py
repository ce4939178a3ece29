"""The papers that thinwire repeats: which command repeats which, for how long, and what of them is left out and why."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A paper, or a chapter of one, and the command that repeats it."""

    name: str
    """Name in the command ``python -m experiments <name>``."""
    title: str
    minutes: int
    """Minutes, roughly, on two cores of a 2020s server."""
    protocol: str
    """The paper's way of taking times, where it says so, and its scaled form here."""

    @property
    def command(self) -> str:
        return f"python -m experiments {self.name}"


CATALOG = (
    Entry(
        "aqsgd",
        "AQ-SGD: Fine-tuning Language Models over Slow Networks (Wang et al., NeurIPS 2022), and its blog post",
        55,
        "the paper gives throughputs and the times of a micro-batch's parts; here medians over rounds in which all "
        "methods take turns",
    ),
    Entry(
        "fullstack",
        "AQ-SGD's full stack: QuantizedAdam, split learning, appendices F and G (the same paper)",
        20,
        "as for AQ-SGD",
    ),
    Entry(
        "cgx",
        "CGX: Adaptive System Support for Communication-Efficient Deep Learning (Markov's thesis, chapter 3)",
        15,
        "means of 300 steps after 10 to warm up (section 3.7.1); here medians over rounds in which methods take turns, "
        "two steps a turn, after steps to warm up",
    ),
    Entry(
        "lgreco",
        "L-GreCo: Layerwise-Adaptive Gradient Compression (Markov's thesis, section 3.6 and chapter 4)",
        15,
        "as for CGX",
    ),
    Entry(
        "qsdp",
        "QSDP: Quantized Distributed Training of Large Models (Markov's thesis, chapter 5)",
        20,
        "means of 50 steps after 10 to warm up (section 5.7); here medians over rounds in which all methods take turns",
    ),
    Entry(
        "fft",
        "FFT-based Gradient Sparsification for the Distributed Training of DNNs (Wang et al., HPDC 2020)",
        15,
        "wall time of whole trainings; here wall time of whole, smaller trainings",
    ),
    Entry(
        "intsgd",
        "IntSGD: Adaptive Floatless Compression of Stochastic Gradients (Mishchenko et al., ICLR 2022)",
        20,
        "the paper breaks the time of a step down into parts; here medians over rounds in which all methods take turns",
    ),
)

LEFT_OUT = (
    (
        "AdaComp (thesis, section 3.7.3)",
        'the thesis adapted it and found that it "did not converge to reasonable accuracy": there is no figure to hold '
        "against",
    ),
    (
        "Bagua and HiPress (thesis, figure 3.6)",
        "other frameworks, on GPUs; HiPress did not run on the thesis's own GPUs either",
    ),
    ("TensorFlow and Horovod (thesis, figure A.1)", "thinwire is a library for PyTorch"),
    (
        "Comparisons of GPUs and servers (thesis, tables 3.1 and 3.2, figures 3.5, B.4 and B.5)",
        "they are facts of machines that are not this one",
    ),
    ("Prices (thesis, table 3.10)", "a cost per token needs the price of an hour, which only who pays it knows"),
    (
        "FFT paper, figures 1 to 4, 7 to 9 and 11",
        "they show schemes, histograms of a training's gradients, number formats and the latency of NCCL's all-gather; "
        "what they argue for is measured in figures 5, 10 and 16",
    ),
    (
        "Data sets and models of the papers",
        "pictures are scikit-learn's digits (CIFAR-10 where a folder of it is given), text is the source of Python's "
        "standard library, models have up to a few million parameters: what two CPU cores train in minutes. Each page "
        "says in what its experiments differ",
    ),
)
"""Experiments that no row stands for, and reasons."""
