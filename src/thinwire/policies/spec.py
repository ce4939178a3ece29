"""Policies as text: ``"lgreco(every=500)"``, and back."""

from __future__ import annotations

from thinwire import policies
from thinwire.arguments import Calls
from thinwire.policies.policy import Policy

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
