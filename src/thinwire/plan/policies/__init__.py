"""Policies: what chooses another plan from time to time while a model trains (thesis, sections 3.6 and 4.4)."""

from thinwire.plan.policies.accordion import Accordion
from thinwire.plan.policies.auto import Auto
from thinwire.plan.policies.bayes import Bayes
from thinwire.plan.policies.by_link import ByLink, LinkChoice, choose_by_link
from thinwire.plan.policies.families import family
from thinwire.plan.policies.kmeans import KMeans
from thinwire.plan.policies.lgreco import LGreco
from thinwire.plan.policies.linear import Linear
from thinwire.plan.policies.policy import Evidence, Policy, Proposal, StepTime, Sync
from thinwire.plan.policies.spec import parse_policy

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
