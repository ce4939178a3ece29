"""A slow network on one machine: network namespaces, token buckets, a delay relay.

```python
with lab.Network(2, rate="100mbit") as network:
    ranks = [network.popen(rank, ["python", "train.py"]) for rank in range(2)]
    for rank in ranks:
        rank.wait()
```
"""

from thinwire_tools.lab.launch import TIMED_OUT, Outcome, launch, link_text, run
from thinwire_tools.lab.loopback import Link, Loopback, free_port
from thinwire_tools.lab.namespaces import NodeNamespaces
from thinwire_tools.lab.network import Network, need_network, unavailable
from thinwire_tools.lab.tools import LabUnavailable
from thinwire_tools.lab.units import parse_rate, parse_time

__all__ = [
    "TIMED_OUT",
    "LabUnavailable",
    "Link",
    "Loopback",
    "Network",
    "NodeNamespaces",
    "Outcome",
    "free_port",
    "launch",
    "link_text",
    "need_network",
    "parse_rate",
    "parse_time",
    "run",
    "unavailable",
]
