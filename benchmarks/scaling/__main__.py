"""Simulation of GPU fleets: ``python -m benchmarks scaling``."""

from __future__ import annotations

from benchmarks.scaling.fleets import main

if __name__ == "__main__":
    main()
