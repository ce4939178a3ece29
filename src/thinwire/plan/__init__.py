"""Plans: which compressor each layer has.

`thinwire.policies` chooses plans while a model trains, and `thinwire.plan.forecast` predicts what a step takes.
"""

from thinwire.plan.cost import Speeds, codec_seconds, declined, sent_bytes
from thinwire.plan.filters import Filter, Names, matches, named_parameters, names_of
from thinwire.plan.plan import DEFAULT_RULES, Plan, Rules
from thinwire.plan.sites import Site, at_site, sharded_plan

__all__ = [
    "DEFAULT_RULES",
    "Filter",
    "Names",
    "Plan",
    "Rules",
    "Site",
    "Speeds",
    "at_site",
    "codec_seconds",
    "declined",
    "matches",
    "named_parameters",
    "names_of",
    "sent_bytes",
    "sharded_plan",
]
