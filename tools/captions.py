"""Captions of the figures on docs/repro-*.md, by paper and by the names of their files."""

from __future__ import annotations

from typing import NamedTuple


class Caption(NamedTuple):
    """``text``: also the picture's alternative text. ``under``: how the title of the table begins that the picture
    follows; without it, the picture comes after all tables."""

    text: str
    under: str = ""


CAPTIONS: dict[str, dict[str, Caption]] = {
    "aqsgd": {
        "aqsgd-1-change": Caption("Figure 1: mean magnitude of activations and of their changes since the last visit"),
        "aqsgd-2-throughput": Caption("Table 2: sequences per second against the paper's rates, 2 stages", "Table 2"),
        "aqsgd-3-curves": Caption("Figures 3 and 7 to 9: training loss of FP32, DirectQ and AQ-SGD", "Figures 3 and"),
        "aqsgd-3ab-labels": Caption("Figure 3 (a, b): training loss of a classification, 2 stages", "Figures 3 and"),
        "aqsgd-4-time": Caption("Figure 4: loss against seconds of training, over two of the paper's rates"),
        "aqsgd-8-fp16": Caption("Figure 8: training loss in fp16, 2 stages", "Figures 3 and"),
        "aqsgd-9-keeping": Caption("Figure 9 (e, f): training loss by the bits of kept messages, 4 stages"),
        "aqsgd-9-recipe": Caption("Figure 9: training loss by the authors' recipe", "Figures 3 and"),
        "aqsgd-9-stages": Caption("Figure 9: training loss of a deeper GPT in 8 stages", "Figures 3 and"),
        "aqsgd-links": Caption(
            "Loss against seconds of training, 4 stages of which the last link is slow", "Bits by link"
        ),
    },
    "fullstack": {
        "fullstack-adam": Caption("Loss against seconds under QuantizedAdam and other optimizers", "QuantizedAdam"),
        "fullstack-5-curves": Caption(
            "Figure 5 (a, b): training loss, and held-out loss at the end", "Figure 5 (a, b)"
        ),
        "fullstack-5-throughput": Caption("Figure 5 (c): sequences per second, 2 stages in 2 replicas", "Figure 5 (c)"),
        "fullstack-5-time": Caption("Figure 5: loss against seconds of training over the slowest link", "Figure 5 (c)"),
        "fullstack-10-split": Caption("Figure 10: training loss and test accuracy of split learning", "Split learning"),
    },
    "cgx": {
        "cgx-3.1": Caption("Figure 3.1: step time if one element in gamma is sent"),
        "cgx-3.3": Caption("Figure 3.3: step time over gloo and shared memory, on one host", "Figure 3.3"),
        "cgx-3.4": Caption("Table 3.4: throughput of reduction schemes, and the error of the mean", "Table 3.4"),
        "cgx-3.6": Caption("Table 3.6: throughput of compressed systems", "Table 3.6"),
        "cgx-3.7": Caption("Table 3.7: share of the speed with nothing sent"),
        "cgx-3.9": Caption("Table 3.9: throughput on two nodes of 2 ranks", "Table 3.9"),
        "cgx-blob": Caption("Section 3.7.2: throughput of layers and of flat buffers", "Section 3.7.2"),
    },
    "fft": {
        "fig5": Caption("Figure 5: a layer's gradient as it is sent and as it arrives, by FFT and by top-k"),
        "fig6": Caption("Figure 6: size of a message of 100 MB of gradients, with and without its bitmap"),
        "fig10": Caption("Figure 10: the least compression ratio that pays, by the link's rate"),
        "fig12": Caption("Figure 12: alpha, the relative error of the mean gradient, during training"),
        "fig13": Caption("Figure 13: training loss and held-out accuracy by theta"),
        "fig14": Caption("Figure 14: held-out loss against seconds of training"),
        "fig15": Caption("Figure 15: distribution of gradients as they are sent and as they arrive"),
        "fig16": Caption("Figure 16: images per second by number of ranks, relative to one rank"),
    },
    "intsgd": {
        "fig1": Caption("Figure 1: IntSGD and the heuristic, held-out accuracy of the ResNet and loss of the LSTM"),
        "fig2": Caption("Figure 2: parts of a step's time by method, the ResNet and the LSTM"),
        "fig3": Caption("Figure 3: the ResNet's training loss (nats) and held-out accuracy", "Table 2"),
        "fig4": Caption("Figure 4: the LSTM's training loss and held-out loss (nats)", "Table 3"),
        "fig5": Caption("Figure 5: held-out accuracy of the ResNet and loss of the LSTM by beta and eps"),
        **{
            f"fig6-{data}": Caption(
                f"Figure 6 on {data}: distance of the loss to its optimum by bits sent and by gradients computed, and "
                "the largest integer by step"
            )
            for data in ("breast_cancer", "digits", "mushrooms", "real-sim", "a5a", "w8a")
        },
    },
    "lgreco": {
        "lgreco-3.7": Caption(
            "Figure 3.7: held-out loss of the GPT against steps and against bytes sent, by policies before they were "
            "mended"
        ),
        "lgreco-3.8": Caption(
            "Figure 3.8: compression error and ratio of policies before they were mended, relative to uniform 4 bits",
            "Table 3.8",
        ),
        "lgreco-4.2": Caption("Figure 4.2: held-out loss against step time, PowerSGD of rank 8, 16 and 32"),
        "lgreco-4.2-4.3": Caption(
            "Tables 4.2 and 4.3: measured compression ratios of the GPT and the CNN", "Tables 4.1"
        ),
        "lgreco-4.3-4.4": Caption(
            "Figures 4.3 and 4.4: tokens per second by number of ranks, over two links", "Figure 4.4"
        ),
        "lgreco-4.5a": Caption(
            "Figure 4.5a: times fewer bytes than uniform PowerSGD during training, by policies before they were mended",
            "Table 4.5",
        ),
        "lgreco-4.5b-B.1-B.6b": Caption(
            "Figures 4.5b, B.1 and B.6b: bytes of each bucket by policy, and time per byte"
        ),
        "lgreco-equal-bytes": Caption(
            "L-GreCo and uniform compression at equal bytes: held-out loss beyond that of fp32", "The GPT at equal"
        ),
        "lgreco-B.2": Caption(
            "Figure B.2: fewer bytes than uniform PowerSGD during training, L-GreCo on the CNN, five seeds"
        ),
        "lgreco-B.3": Caption("Figure B.3: parts of a step's time under PowerSGD, over two links"),
        "lgreco-B.6a": Caption("Figure B.6a: loss beyond the uncompressed one against the squared compression error"),
    },
    "qsdp": {
        "qsdp-5.1": Caption("Table 5.1: perplexity during training, W8G8 and the baseline, three sizes", "Table 5.1"),
        "qsdp-5.2": Caption("Table 5.2: perplexity by bits of weights and gradients", "Table 5.2"),
        "qsdp-5.2-time": Caption("Figure 5.2: perplexity against seconds of training", "Figure 5.3"),
        "qsdp-5.3": Caption("Table 5.3: perplexity of uniform and of learned levels", "Tables 5.3"),
        "qsdp-5.3-bandwidth": Caption("Figure 5.3: step time by the rate of each link", "Figure 5.3"),
        "qsdp-5.7.1": Caption("Section 5.7.1: perplexity of a GPT of words, with and without buckets", "Table 5.1"),
        "qsdp-C.1": Caption("Figure C.1: step time if only a part of weights, gradients or both is sent", "Table C.2"),
        "qsdp-C.2-C.3": Caption("Figures C.2 and C.3: error of uniform and learned levels during training"),
        "qsdp-C.4": Caption("Figure C.4: perplexity with and without buckets"),
        "qsdp-C.5": Caption("Figure C.5: loss above the optimum of a regression, by quantization of its weights"),
    },
}
