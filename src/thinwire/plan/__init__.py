"""Plans, which give each layer its compressor.

`thinwire.policies` chooses plans while a model trains, and `thinwire.plan.forecast` predicts what a step takes.
"""

from thinwire.plan.cost import (
    Speeds as Speeds,
    codec_seconds as codec_seconds,
    declined as declined,
    sent_bytes as sent_bytes,
)
from thinwire.plan.filters import (
    Filter as Filter,
    Names as Names,
    matches as matches,
    named_parameters as named_parameters,
    parameter_names as parameter_names,
)
from thinwire.plan.plan import DEFAULT_RULES as DEFAULT_RULES, Plan as Plan, Rules as Rules
from thinwire.plan.sites import Site as Site, at_site as at_site, sharded_plan as sharded_plan
