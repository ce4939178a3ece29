"""Plans: which compressor for which layer."""

from thinwire.plan.accordion import Accordion
from thinwire.plan.auto import Auto
from thinwire.plan.by_link import ByLink, LinkChoice, choose_by_link
from thinwire.plan.cost import Speeds, declined, sent_bytes
from thinwire.plan.family import family
from thinwire.plan.filters import Filter, matches
from thinwire.plan.heuristics import Bayes, KMeans, Linear
from thinwire.plan.lgreco import LGreco
from thinwire.plan.plan import DEFAULT_RULES, Plan, Rules
from thinwire.plan.policy import Evidence, Policy, Proposal, StepTime, Sync
from thinwire.plan.record import LayerRow, PlanRecord
from thinwire.plan.sites import Site, at_site, balanced, sharded_plan
from thinwire.plan.spec import parse_policy

__all__ = [
    "DEFAULT_RULES",
    "Accordion",
    "Auto",
    "Bayes",
    "ByLink",
    "Evidence",
    "Filter",
    "KMeans",
    "LGreco",
    "LayerRow",
    "Linear",
    "LinkChoice",
    "Plan",
    "PlanRecord",
    "Policy",
    "Proposal",
    "Rules",
    "Site",
    "Speeds",
    "StepTime",
    "Sync",
    "at_site",
    "balanced",
    "choose_by_link",
    "declined",
    "family",
    "matches",
    "parse_policy",
    "sent_bytes",
    "sharded_plan",
]
