"""Arguments of `DiLoCo` under the names of the methods that they are."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from thinwire.arguments import check_choice
from thinwire.local.fragments import FEW_BITS
from thinwire.local.outer import Nesterov

_PRESETS = MappingProxyType(
    {
        "local_sgd": {"every": 10, "outer": Nesterov(lr=1.0, momentum=0.0), "compressor": "raw", "feedback": False},
        "diloco": {"every": 100, "compressor": "minmax(bits=4)", "feedback": False},
        "muloco": {"every": 25, "compressor": FEW_BITS},
        "streaming": {"every": 24, "fragments": 4, "overlap": 2, "compressor": "minmax(bits=4)", "feedback": False},
    }
)


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of `DiLoCo` for a known method, with ``changes``.

    ::

        local = thinwire.local.DiLoCo(model, optimizer, **thinwire.local.preset("streaming", every=48))

    - ``"local_sgd"``: average weights in fp32 every 10 steps (Stich 2018, 1805.09767).
    - ``"diloco"``: pseudo-gradients in 4 bits every 100 steps (Douillard et al. 2023, 2311.08105). The outer momentum
      is 0.5, which also suits few exchanges; the paper's is 0.9.
    - ``"muloco"``: 2 bits with error feedback every 25 steps; train with `thinwire.optim.Muon` (2505.23725).
    - ``"streaming"``: four fragments in 4 bits, one every 6 steps, used 2 steps after they were sent (2501.18512).

    Raises:
        ValueError: there is no preset of this name.
    """
    check_choice("preset", name, tuple(_PRESETS))
    return {**_PRESETS[name], **changes}
