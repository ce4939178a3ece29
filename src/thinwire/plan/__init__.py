"""Plans: which compressor for which layer."""

from thinwire.plan.cost import Speeds, declined
from thinwire.plan.filters import Filter, matches
from thinwire.plan.plan import DEFAULT_RULES, Plan, Rules

__all__ = ["DEFAULT_RULES", "Filter", "Plan", "Rules", "Speeds", "declined", "matches"]
