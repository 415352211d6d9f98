"""``python -m msprobe``: the same as the command ``msprobe``."""

import sys

from .cli import main

sys.exit(main())
