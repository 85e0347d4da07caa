"""Hours and cost of each accepted model: everything that its preset computed since the promotion before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlcore.tasks.store.audit_log import AuditEntry, read_entries
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.prices import Prices, read_prices
from rlcore.tasks.store.settings import Home

PROMOTED = "promote"  # action of the audit log


@dataclass(frozen=True, kw_only=True)
class Tries:
    """Everything that a preset computed between two promotions; ``cost`` is None if a price is not known.

    ``model``: the accepted version, ``tiny-grpo/3``; empty for the time since the last promotion.
    """

    model: str
    hours: float
    cost: float | None


def tries_of(home: Home, preset: str) -> tuple[Tries, ...]:
    """Return the tries of a preset for each of its promotions, oldest first, and those since the last one.

    There are none before the first promotion. A stage that computes with no model has the machine of the stage that was
    recorded after it.
    """
    accepted = [each for each in read_entries(home) if each.action == PROMOTED and _preset_of(each) == preset]
    if not accepted:
        return ()
    records, prices = _records(home, preset), read_prices(home)
    times = ["", *(each.time for each in accepted), "~"]  # ISO times in UTC; "~" follows each of them
    names = [*(each.subject for each in accepted), ""]
    parts = [[each for each in records if begin < each.created <= end] for begin, end in pairwise(times)]
    return tuple(_tries(name, part, prices) for name, part in zip(names, parts, strict=True))


def accepted_presets(home: Home) -> frozenset[str]:
    """Return the presets of which a model was promoted."""
    return frozenset(_preset_of(each) for each in read_entries(home) if each.action == PROMOTED)


def per_accepted(tries: Sequence[Tries]) -> Mapping[str, float]:
    """Return hours and cost per accepted model as metrics; none before the first promotion, no cost without prices."""
    if not tries:
        return {}
    count = len(tries) - 1
    found = {"accepted/models": float(count), "accepted/hours": sum(each.hours for each in tries) / count}
    costs = [each.cost for each in tries if each.cost is not None]
    return found | ({"accepted/cost": sum(costs) / count} if len(costs) == len(tries) else {})


def accepted_lines(home: Home, preset: str) -> Iterator[str]:
    """Yield a line per accepted model with the hours and the cost of all tries, and one for the time since."""
    tries, currency = tries_of(home, preset), read_prices(home).currency
    for each in tries:
        cost = f", {each.cost:.4g} {currency}" if each.cost is not None else ""
        yield f"{'accepted' if each.model else 'since then':<24}{each.hours:.3g} h{cost}  {each.model}".rstrip()


def _preset_of(entry: AuditEntry) -> str:
    return entry.subject.rpartition("/")[0].rpartition("-")[0]  # of mine-grpo/3; a stage's name has no dash


def _records(home: Home, preset: str) -> list[Record]:
    """Return the records of all stages that runs of a preset have used, oldest first."""
    cache = StageCache(home.cache)
    found = [
        record
        for folder in home.cache.glob("*")
        if (used := cache.used_keys(folder.name, preset))
        for record in cache.records(folder.name)
        if record.key in used
    ]
    return sorted(found, key=lambda each: each.created)


def _tries(model: str, records: Sequence[Record], prices: Prices) -> Tries:
    costs, machine = list[float | None](), dict[str, object]()
    for record in reversed(records):
        machine = record.ingredients.get("machine") or machine
        price = prices.of(machine)
        costs.append(None if price is None else record.seconds / 3600.0 * price)
    known = [each for each in costs if each is not None]
    hours = sum(each.seconds for each in records) / 3600.0
    return Tries(model=model, hours=hours, cost=sum(known) if len(known) == len(costs) else None)
