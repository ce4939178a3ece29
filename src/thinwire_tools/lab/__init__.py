"""A slow network on one machine: network namespaces, token buckets, a delay relay.

```python
with lab.Network(2, rate="100mbit") as network:
    ranks = [network.popen(rank, ["python", "train.py"]) for rank in range(2)]
    for rank in ranks:
        rank.wait()
```
"""

from thinwire_tools.lab.launch import (
    TIMED_OUT as TIMED_OUT,
    Outcome as Outcome,
    launch as launch,
    link_text as link_text,
)
from thinwire_tools.lab.loopback import Link as Link, Loopback as Loopback, free_port as free_port
from thinwire_tools.lab.namespaces import NodeNamespaces as NodeNamespaces
from thinwire_tools.lab.network import Network as Network, need_network as need_network, unavailable as unavailable
from thinwire_tools.lab.tools import LabUnavailableError as LabUnavailableError
from thinwire_tools.lab.units import parse_rate as parse_rate, parse_time as parse_time
