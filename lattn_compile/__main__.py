"""`python -m lattn_compile`: the command `lattn-compile`."""

from __future__ import annotations

import sys

from lattn_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
