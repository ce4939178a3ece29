"""Policies choose another plan from time to time while a model trains (``adapt=``); `Auto` decides what pays.

See docs/adaptive.md and docs/auto.md.
"""

from thinwire.plan.policies import (
    Accordion,
    Auto,
    Bayes,
    ByLink,
    Evidence,
    KMeans,
    LGreco,
    Linear,
    LinkChoice,
    Policy,
    Proposal,
    family,
    parse_policy,
)

__all__ = [
    "Accordion",
    "Auto",
    "Bayes",
    "ByLink",
    "Evidence",
    "KMeans",
    "LGreco",
    "Linear",
    "LinkChoice",
    "Policy",
    "Proposal",
    "family",
    "parse_policy",
]
