"""Which side a prompt falls on, by its hash alone: never by row, so no prompt is trained on and evaluated on.

Generators hold out a fixed tenth of all problems, whatever the seed or the kind of rows, so that datasets made apart
cannot leak into one another. Files hold out the prompts with the smallest hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pandas as pd

from data_contracts.errors import ContractError

HELD_OUT_TENTH = 16**8 // 10


def is_held_out(digest: str) -> bool:
    """Whether a generator keeps the prompt of this hash for evaluation: one in ten."""
    return int(digest[:8], 16) < HELD_OUT_TENTH


def held_out_prompts(
    hashes: Sequence[str], *, num_train: int, num_eval: int, first: Iterable[str] = ()
) -> frozenset[str]:
    """The prompts of a file that are kept for evaluation, given the prompt hash of each row.

    ``num_eval`` prompts, or their share when there are fewer than ``num_train + num_eval`` rows. Prompts in ``first``
    (those that another dataset evaluates on) are held out before any other, all of them.
    """
    prompts = sorted(set(hashes))
    wanted = num_eval
    if len(hashes) < num_train + num_eval:
        wanted = max(1, len(prompts) * num_eval // (num_train + num_eval))
    reserved = set(first) & set(prompts)
    others = [prompt for prompt in prompts if prompt not in reserved]
    return frozenset(reserved) | frozenset(others[: max(0, wanted - len(reserved))])


def assign(splits: Sequence[str | None], hashes: Sequence[str], held_out: frozenset[str], *, where: str) -> list[str]:
    """A split for every row: the source's own if it has one for all rows, else by the prompt's hash.

    Raises:
        ContractError: some rows have a split and others have none.
    """
    given = [split for split in splits if split is not None]
    if not given:
        return ["eval" if digest in held_out else "train" for digest in hashes]
    if len(given) < len(splits):
        raise ContractError(
            f"{len(splits) - len(given)} of {len(splits)} rows have no 'split', the others have one",
            where=where,
            fix="give every row a split, or none and let prompts be divided by their hash",
        )
    return given


def select(frame: pd.DataFrame, hashes: Sequence[str], *, num_train: int, num_eval: int, seed: int) -> pd.DataFrame:
    """At most ``num_train`` and ``num_eval`` rows, in their order.

    One row of each prompt before a second row of any: held-out rows are then independent as far as the data allow.
    Which training prompts come first depends on ``seed``; which evaluation prompts do, does not.
    """
    keys = pd.DataFrame({"split": frame["split"].to_numpy(), "hash": list(hashes)})
    keys["turn"] = keys.groupby("hash").cumcount()
    keys["order"] = [
        hashlib.sha256(f"{seed}/{digest}".encode()).hexdigest() if split == "train" else digest
        for split, digest in zip(keys["split"], keys["hash"], strict=True)
    ]
    ranked = keys.sort_values(["turn", "order"], kind="stable")
    limits = {"train": num_train, "eval": num_eval}
    kept = [place for split, limit in limits.items() for place in ranked.index[ranked["split"] == split][:limit]]
    return frame.iloc[sorted(kept)].reset_index(drop=True)
