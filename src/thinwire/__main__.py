"""``python -m thinwire``: the ``thinwire`` command, for launchers such as torchrun that start modules."""

import sys

from thinwire_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
