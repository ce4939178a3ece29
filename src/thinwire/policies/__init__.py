"""Policies, which choose other plans from time to time while a model trains (thesis, sections 3.6 and 4.4)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.policies.auto import Auto
from thinwire.policies.policy import Evidence, Policy, Proposal, StepTime, Sync
from thinwire.policies.spec import parse_policy

if TYPE_CHECKING:
    from thinwire.policies.accordion import Accordion
    from thinwire.policies.by_link import ByLink, LinkChoice, choose_by_link
    from thinwire.policies.families import family
    from thinwire.policies.kmeans import KMeans
    from thinwire.policies.lgreco import LGreco

__all__ = [
    "Accordion",
    "Auto",
    "ByLink",
    "Evidence",
    "KMeans",
    "LGreco",
    "LinkChoice",
    "Policy",
    "Proposal",
    "StepTime",
    "Sync",
    "choose_by_link",
    "family",
    "parse_policy",
]

_LATE = {
    "Accordion": "thinwire.policies.accordion",
    "ByLink": "thinwire.policies.by_link",
    "KMeans": "thinwire.policies.kmeans",
    "LGreco": "thinwire.policies.lgreco",
    "LinkChoice": "thinwire.policies.by_link",
    "choose_by_link": "thinwire.policies.by_link",
    "family": "thinwire.policies.families",
}


def __getattr__(name: str) -> Any:
    # A training has one policy or none.
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
