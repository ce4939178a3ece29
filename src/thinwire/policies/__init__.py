"""Policies: what chooses another plan from time to time while a model trains (thesis, sections 3.6 and 4.4)."""

from thinwire.policies.accordion import Accordion
from thinwire.policies.auto import Auto
from thinwire.policies.bayes import Bayes
from thinwire.policies.by_link import ByLink, LinkChoice, choose_by_link
from thinwire.policies.families import family
from thinwire.policies.kmeans import KMeans
from thinwire.policies.lgreco import LGreco
from thinwire.policies.linear import Linear
from thinwire.policies.policy import Evidence, Policy, Proposal, StepTime, Sync
from thinwire.policies.spec import parse_policy

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
    "StepTime",
    "Sync",
    "choose_by_link",
    "family",
    "parse_policy",
]
