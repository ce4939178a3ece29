"""Sections 3.5.4 and 3.7.2: compression that sees flat buffers, as QNCCL does, beside compression layer by layer."""

from __future__ import annotations

from statistics import fmean

from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Scale, Study
from thinwire.repro.cgx.throughput import chart, throughput
from thinwire.repro.cgx.ways import FP32, NOTHING, THINWIRE, Way
from thinwire.repro.findings import Finding

BLOB = Way("blob", "blob", "#c0392b", kind="blob")
_SPEC_1024 = "minmax(bits=4, bucket=1024)"
THINWIRE_1024 = Way("thinwire 1024", "thinwire, buckets of 1024", "#0a7d4f", spec=_SPEC_1024)
BLOB_1024 = Way("blob 1024", "blob, buckets of 1024", "#c0392b", kind="blob", spec=_SPEC_1024)
"""Of which the errors are compared: the thesis takes such buckets for CNNs, and without layers only those of 128."""


def ways(scale: Scale) -> list[Way]:
    """That are timed."""
    return [FP32, THINWIRE, BLOB, NOTHING]


def blob(study: Study) -> list[Finding]:
    """Throughput and error of DDP over a process group that compresses, and of thinwire's own hook."""
    models = study.scale.models
    found = {model.name: study.times(model, ways(study.scale)) for model in models}
    chart(study, "blob", found, {model.name: ways(study.scale) for model in models})
    lossy = (THINWIRE, BLOB, THINWIRE_1024, BLOB_1024)
    return [row for model in models for row in _rows(study, model, found[model.name], study.errors(model, lossy))]


def _rows(study: Study, model: Model, times: Times, errors: dict[str, list[float]]) -> list[Finding]:
    where = study.where(model)
    mean = {name: fmean(values) for name, values in errors.items()}

    def times_the_error(blob: Way, layers: Way) -> list[float]:
        return [theirs / own for theirs, own in zip(errors[blob.name], errors[layers.name], strict=True)]

    return [
        Finding(
            "blob",
            f"blob_over_fp32/{model.name}",
            times.times_faster(BLOB.name, FP32.name),
            "x",
            f"{model.title}: compression without layers is faster than fp32, by a limited margin (section 3.7.2)",
            f"{times.times_faster(BLOB.name, FP32.name):.2f}x fp32's throughput, {where}",
            study.verdict(above(times.over(BLOB.name, FP32.name))),
        ),
        Finding(
            "blob",
            f"layers_over_blob/{model.name}",
            times.times_faster(THINWIRE.name, BLOB.name),
            "x",
            f"{model.title}: CGX is faster than compression without layers (section 3.7.2)",
            f"{times.times_faster(THINWIRE.name, BLOB.name):.2f}x its throughput, {where}",
            study.verdict(above(times.over(THINWIRE.name, BLOB.name))),
        ),
        Finding(
            "blob",
            f"error/{model.name}",
            mean[BLOB_1024.name] / mean[THINWIRE_1024.name],
            "x",
            f"{model.title}: without layers the error is higher (section 3.5.1)",
            "relative error of the mean that arrives, in buckets of 1024: "
            f"{mean[BLOB_1024.name]:.3f} against {mean[THINWIRE_1024.name]:.3f} layer by layer; in buckets of 128: "
            f"{mean[BLOB.name]:.3f} against {mean[THINWIRE.name]:.3f}",
            above(times_the_error(BLOB_1024, THINWIRE_1024)),
            {"by_step": errors, "mean": mean},
        ),
        *throughput("blob", model, times, ways(study.scale), reference=FP32, thesis={}, where=where),
    ]
