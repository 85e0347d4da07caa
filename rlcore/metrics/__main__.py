"""Print the glossary."""

import sys

from rlcore.metrics import render

sys.stdout.write(render())
