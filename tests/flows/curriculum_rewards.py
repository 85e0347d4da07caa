"""Rewards of ``test_curriculum.py``, as a user's own: pass rates by construction, and a run that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rlcore.types import Rollout

DIE = "die"  # in the home: kill the run after its second iteration


def is_odd(reference: str) -> bool:
    """Return True if an integer's last digit is odd."""
    return reference[-1] in "13579"


def sometimes(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(is_odd(one.prompt.reference) and place % 2) for place, one in enumerate(rollouts)]


def text_of_odd_until_killed(rollouts: Sequence[Rollout]) -> list[float]:
    """A number that depends on the text where the reference is odd, and 0 where it is even."""
    length_until_killed(rollouts)
    return [is_odd(one.prompt.reference) * (sum(map(ord, one.text)) % 97) / 97 for one in rollouts]


def length_until_killed(rollouts: Sequence[Rollout]) -> list[float]:
    home = Path(os.environ["RLCORE_HOME"])
    if (home / DIE).exists() and list(home.glob("work/*/checkpoints/step-000002")):
        (home / DIE).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(one.text) / 100 for one in rollouts]
