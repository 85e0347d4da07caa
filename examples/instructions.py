"""AlpacaEval's pairs in three parts by prompt: held-out ones, and those of a reward model and of an independent judge.

A judge trained on the reward model's prompts can repeat errors that a policy has used.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

from rlcore.data_contracts.adapters.expressions import Row
from rlcore.data_contracts.adapters.table import ADAPTERS, Adapter
from rlcore.data_contracts.errors import LeftOutError
from rlcore.data_contracts.gate.stream import RowFn

PARTS = ("eval", "policy", "judge")


def part_of(prompt: str) -> str:
    """Return the part of a prompt, whatever its case and blanks."""
    digest = hashlib.sha256(" ".join(prompt.casefold().split()).encode()).hexdigest()
    return PARTS[int(digest, 16) % len(PARTS)]


def _divided(make: RowFn, own: str, row: Row) -> list[dict[str, Any]]:
    made = make(row)
    part = part_of(made[0]["messages"][-1]["content"])
    if part not in ("eval", own):
        raise LeftOutError("prompt", f"of the part {part!r}")
    return [{**each, "split": "eval" if part == "eval" else "train"} for each in made]


def _adapter(own: str) -> Adapter:
    known = ADAPTERS["alpaca_eval"]
    return replace(known, rows={kind: partial(_divided, make, own) for kind, make in known.rows.items()})


POLICY, JUDGE = _adapter("policy"), _adapter("judge")
