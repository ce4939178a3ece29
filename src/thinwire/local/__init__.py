"""Local updates: workers train alone for many steps, then exchange what they have learned, compressed.

`DiLoCo` sends one compressed pseudo-gradient every few tens of steps instead of one gradient a step, so that a link of
100 Mbit/s, or of 10, costs little time. See docs/local.md. `ManagedDiLoCo` does so where workers join and leave.
"""

from thinwire.local.diloco import DiLoCo as DiLoCo, preset as preset, send_nothing as send_nothing
from thinwire.local.fragments import Nesterov as Nesterov
from thinwire.local.managed import ManagedDiLoCo as ManagedDiLoCo
