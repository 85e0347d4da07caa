"""Two answers to one prompt, and what a judge says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcore.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """``first`` is shown in front of ``second``. The token ids are those that a reward model reads."""

    messages: tuple[Message, ...]
    first: str
    second: str
    reference: str = ""
    prompt_ids: tuple[int, ...] = ()
    first_ids: tuple[int, ...] = ()
    second_ids: tuple[int, ...] = ()

    @property
    def swapped(self) -> Pair:
        """The same answers in the other order."""
        return replace(self, first=self.second, second=self.first, first_ids=self.second_ids, second_ids=self.first_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """``value``: 1 the first answer is better, 0 the second, ½ a tie; None unjudged, with the reason in ``error``.

    Tokens are those that the judge's server counted, also for a reply that was no verdict; ``cost`` is their price.
    """

    value: float | None
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
