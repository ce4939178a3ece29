"""Specs: the text of a compressor, ``"minmax(bits=4, bucket=128)"``, and back."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from thinwire.arguments import Calls
from thinwire.compressors._core.compressor import Compressor

_registry: dict[str, Callable[..., Compressor]] = {}


def register(make: Callable[..., Compressor], name: str | None = None) -> Callable[..., Compressor]:
    """Make a compressor available to `parse`: a class under its ``spec_name``, or a function under ``name``.

    Other packages declare it in the entry point group ``thinwire.compressors`` instead.
    """
    name = name or str(getattr(make, "spec_name", None) or make.__name__)
    known = _registry.setdefault(name, make)
    if known is not make:
        raise ValueError(f"the name {name!r} already belongs to {known.__module__}.{known.__qualname__}")
    return make


def registered() -> dict[str, Callable[..., Compressor]]:
    """Return compressors by name: those of thinwire, and of other packages as far as they were used."""
    return dict(_registry)


def _find(name: str) -> Callable[..., Compressor] | None:
    if name in _registry:
        return _registry[name]
    for point in entry_points(group="thinwire.compressors"):
        if point.name == name:
            return register(point.load(), name)
    if name.lower() == "auto":
        raise ValueError(
            "auto is no compressor: it chooses those of all layers, and goes alone as the compressor of a "
            'DistributedDataParallel model, thinwire.compress(model, "auto")'
        )
    return None


PRESETS = {
    "8bit": "minmax(bits=8, bucket=128)",
    "4bit": "minmax(bits=4, bucket=128)",
    "2bit": "ef(minmax(bits=2, bucket=128))",
    "bf16": "cast(bf16)",
}
"""Specs by their short names."""
_OTHER_NAMES = {
    "1bit": "onebit",
    **{f"{bits}bit": f"minmax(bits={bits})" for bits in (3, 5, 6, 7)},
    **dict.fromkeys(("int4", "fp4", "float4", "nvfp4", "bits"), "4bit"),
    **dict.fromkeys(("int8", "fp8", "float8"), "8bit"),
    **dict.fromkeys(("fp16", "float16", "half"), "cast(fp16)"),
    **dict.fromkeys(("none", "fp32", "float32", "off"), "raw"),
    **dict.fromkeys(("ef", "4bit+ef", "ef+4bit"), "ef(minmax(bits=4, bucket=128))"),
    "bfloat16": "bf16",
    "density": "topk(density=0.01)",
    "dgc": "dgc(topk(density=0.001))",
    "errorfeedback": "ef",
    "rank": "powersgd(rank=4)",
    "signsgd": "sign",
}
"""Specs by other names that users may give them."""
_calls = Calls[Compressor](
    kind="compressor",
    what="spec",
    example="minmax(bits=4, bucket=128)",
    find=_find,
    names=registered,
    nested=("Compressor", "Coded", "Summed", "Sparsifier"),
    presets=PRESETS,
    others=_OTHER_NAMES,
)


def parse(spec: str | Compressor) -> Compressor:
    """Return the compressor of a spec: ``parse("minmax(bits=4, bucket=128)") == MinMax(bits=4, bucket=128)``.

    ``topk(density=0.01) | minmax(bits=8)`` codes the values that the first chooses. Nothing in the spec is evaluated.
    Positional values belong to the parameters in their order. ``8bit``, ``4bit``, ``2bit`` and ``bf16`` are `PRESETS`.

    Raises:
        ValueError: the spec is invalid, or names a compressor or a parameter that does not exist; the error shows the
            position and the closest valid spec. Or a parameter is out of range.
        TypeError: a parameter has the wrong type.
    """
    return spec if isinstance(spec, Compressor) else _calls.parse(spec)
