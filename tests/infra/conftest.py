"""Puts this folder on the path: in importlib mode pytest does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
