"""``python -m mha2mla``: the same as the command ``mha2mla``."""

import sys

from mha2mla.cli import main

sys.exit(main())
