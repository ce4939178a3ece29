"""Policies, which choose other plans from time to time while a model trains, and policies as text."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from thinwire import policies
from thinwire.arguments import Calls, check_int
from thinwire.collectives import Algorithm, ScatterReduceAllGather
from thinwire.compressors import Compressor

if TYPE_CHECKING:
    from thinwire.plan.cost import Speeds
    from thinwire.plan.forecast import Links, Pace


_TRIAL_STEPS = 50


class Sync(NamedTuple):
    """One step's communication."""

    bucket_bytes: tuple[int, ...]
    """Bytes that a rank sent for each bucket, in the order in which they are sent."""
    seconds: float
    """Seconds from the start of the first bucket to the end of the last one."""


class StepTime(NamedTuple):
    """The duration of one step, from the first bucket of a backward pass to that of the next."""

    pace: Pace
    """The step without waiting for communication."""
    seconds: float
    compressed: bool


@dataclass(frozen=True)
class Evidence:
    """Observations of an interval of training, on the rank that decides for all."""

    reference: Mapping[str, Compressor]
    """Compressors that `thinwire.compress` was given, for each layer that is compressed."""
    present: Mapping[str, Compressor]
    """Present compressors of these layers."""
    gradients: Mapping[str, Tensor]
    """Sums of this rank's gradients over some steps, in their layers' shapes. Layers without any are not in it."""
    num_ranks: int
    step: int = 0
    """Step in which the new plan begins, counted from the first compressed one."""
    learning_rate: float | None = None
    """Learning rate of the optimizer, where the Wire knows it."""
    bucket_of: Mapping[str, int] = field(default_factory=dict)
    """Index of each layer's DDP bucket in the order in which buckets are sent."""
    syncs: Sequence[Sync] = ()
    """Communication of steps, for policies that ask for it: the last ones of each plan, and the latest at the end."""
    trials: int = 0
    """Number of plans tried so far with `Proposal.trial`."""
    speeds: Speeds | None = None
    """Measured speeds of all candidates and of the links, for policies that ask for them."""
    memory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Notes of the policy at its last decision, by layer."""
    learning_rate_dropped: bool = False
    """Whether the learning rate dropped since the last decision, as by a step of a schedule but not by a cosine."""
    unsuited: Mapping[str, Compressor] = field(default_factory=dict)
    """Layers that the rules leave raw because their shape does not suit the compressor, and that compressor. A policy
    may give them one that does; they are not in ``reference``."""
    crossings: float = 0.0
    """Ratio of the bytes that a rank sends by the present algorithm to those of an encoded layer; 0 for 2(n−1)/n."""
    links: Links | None = None
    """Measured rates of the links, for policies that need them."""
    codec_s: Mapping[Compressor, float] = field(default_factory=dict)
    """Measured speeds of compressors: seconds that an element costs a rank in a step."""
    steps: Sequence[StepTime] = ()
    """Durations of the last steps, with the present plan."""
    asked: Algorithm = field(default_factory=ScatterReduceAllGather)
    """Collective algorithm that `thinwire.compress` was given."""
    algorithm: Algorithm = field(default_factory=ScatterReduceAllGather)
    """Collective algorithm in use."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Number of times that a layer is sent in a step, relative to others; 1 for layers that are not listed."""


@dataclass(frozen=True)
class Proposal:
    """A plan that a policy proposes, and its explanation."""

    layers: Mapping[str, Compressor]
    """Compressor of every layer of `Evidence.reference`."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Squared L2 error of each layer's sum of gradients with these compressors. Empty where no errors were taken."""
    reference_errors: Mapping[str, float] = field(default_factory=dict)
    """Squared L2 errors with the reference, by layer."""
    note: str = ""
    """A note for the user, for example why the reference was kept."""
    memory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Notes for the next decision, by layer."""
    errors_s: float = 0.0
    """Seconds that finding the errors took."""
    solve_s: float = 0.0
    """Seconds that the choice took."""
    algorithm: Algorithm | None = None
    """Collective algorithm from now on; None keeps the present one."""
    trial: bool = False
    """Whether the plan is only tried, to be measured: the next decision takes effect after `Policy.trial_steps`."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """The base of policies: they see gradients summed over some steps, and propose plans from time to time.

    One rank decides while training continues; ranks take its plan over between two steps, the same one on all. A policy
    has parameters only: its memory is in `Proposal.memory`, which is checkpointed.
    """

    every: int = 500
    """Number of steps between two decisions."""
    warmup: int = 0
    """Steps at the beginning that stay dense, as the learning rate's warm-up (thesis, section 4.6.1). The first plan
    begins with the first compressed step if they are more than ``lag``, else after ``every``."""
    window: int | None = None
    """Steps whose gradients are summed for a decision; None: a tenth of ``every``."""
    lag: int | None = None
    """Steps that a decision may take before training waits for it; None: a twentieth of ``every``."""

    def __post_init__(self) -> None:
        for name, least in (("every", 2), ("warmup", 0), ("window", 1), ("lag", 1)):
            if getattr(self, name) is not None or name in ("every", "warmup"):
                check_int(name, getattr(self, name), least)
        if self.window_steps + self.lag_steps > self.every:
            raise ValueError(
                f"window={self.window_steps} and lag={self.lag_steps} do not fit into every={self.every} steps"
            )

    @property
    def lag_steps(self) -> int:
        return max(1, self.every // 20) if self.lag is None else self.lag

    @property
    def window_steps(self) -> int:
        return min(max(1, self.every // 10), self.every - self.lag_steps) if self.window is None else self.window

    @property
    def trial_steps(self) -> int:
        """Number of steps for which a plan is tried (thesis, section 4.5): 50, more where a decision takes as long."""
        return min(self.every, max(_TRIAL_STEPS, 2 * self.lag_steps))

    @property
    def memory_size(self) -> int:
        """Number of values that the policy remembers of each layer."""
        return 0

    @property
    def needs_syncs(self) -> bool:
        """Whether the policy needs `Evidence.syncs`, which a simulation lacks."""
        return False

    def to_time(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        """Return the compressors whose speeds the policy needs in `Evidence.speeds`; none if it needs no speeds."""
        return frozenset()

    def to_measure(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        """Return the compressors whose speeds all ranks measure before each decision, and with them the links and the
        steps, for `Evidence.codec_s`, `links` and `steps`; none if the policy needs nothing of that."""
        return frozenset()

    @property
    def considers(self) -> tuple[Algorithm, ...]:
        """Collective algorithms to choose from; empty if the policy chooses none. The links are measured for them,
        and the chosen one is in checkpoints."""
        return ()

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:  # noqa: B027
        """Raise ``ValueError`` if the policy cannot choose for these layers. Called before training, on every rank."""

    @abstractmethod
    def propose(self, evidence: Evidence) -> Proposal:
        """Return the plan from now on. It must not change ``evidence``."""

    def __str__(self) -> str:
        shown = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                text = str(value) if isinstance(value, Policy) else getattr(value, "__qualname__", repr(value))
                shown.append(f"{f.name}={text}")
        return f"{type(self).__name__.lower()}({', '.join(shown)})"


def gradient_norm(gradient: Tensor) -> float:
    """Return the L2 norm; not finite where the gradient is not."""
    norm = float(gradient.detach().float().norm())
    return norm if math.isfinite(norm) else math.inf


_POLICIES = {name.lower(): name for name in ("Accordion", "Auto", "KMeans", "LGreco")}
"""Names of the classes in `thinwire.policies` by their names in texts."""
_calls = Calls[Policy](
    kind="policy",
    what="policy",
    example="lgreco(every=500)",
    find=lambda name: getattr(policies, _POLICIES.get(name.lower(), ""), None),
    names=lambda: _POLICIES,
    nested=("Policy",),
)


def parse_policy(text: str | Policy) -> Policy:
    """Return the policy of a text: ``"lgreco(every=500, reference=accordion())"``. Nothing in it is evaluated.

    Raises:
        ValueError: there is no such policy or parameter, or a value is out of its range.
    """
    try:
        return text if isinstance(text, Policy) else _calls.parse(text)
    except TypeError as error:
        raise ValueError(f"{text!r} is not a policy: {error}") from None
