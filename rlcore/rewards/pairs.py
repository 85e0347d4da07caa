"""Two answers to one prompt, and the judgement of a pair judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcore.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers in the order shown. The token ids are for reward models."""

    messages: tuple[Message, ...]
    first: str
    second: str
    reference: str = ""
    prompt_ids: tuple[int, ...] = ()
    first_ids: tuple[int, ...] = ()
    second_ids: tuple[int, ...] = ()

    @property
    def swapped(self) -> Pair:
        """Return the answers in the other order."""
        return replace(self, first=self.second, second=self.first, first_ids=self.second_ids, second_ids=self.first_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Result of a pair judge.

    Attributes:
        value: 1 if the first answer is better, 0 if the second is, ½ for a tie, None if unjudged.
        error: Reason if unjudged.
        prompt_tokens: Tokens counted by the server, also for an unusable reply.
        cost: Price of the tokens.
    """

    value: float | None
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
