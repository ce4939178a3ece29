"""``python -m thinwire``: the ``thinwire`` command, for launchers such as torchrun that start modules."""

import sys

from thinwire.cli import main

sys.exit(main())
