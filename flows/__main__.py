"""The command ``rlcore`` as ``python -m rlcore.flows``, if the console script is not installed."""

from __future__ import annotations

import sys

from rlcore.flows.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
