"""Tests that need the peers are collected only where `make peers` has installed them."""

from __future__ import annotations

from importlib.util import find_spec

_ARE_INSTALLED = all(find_spec(name) is not None for name in ("trl", "verl", "openrlhf"))
collect_ignore_glob = [] if _ARE_INSTALLED else ["test_*.py"]
