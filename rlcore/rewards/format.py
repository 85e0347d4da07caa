"""Reward of the answer format, by counting and searching in linear time.

A user's regular expression may need exponential time, so it is matched in a process with a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.config import Duration
from rlcore.errors import ConfigError
from rlcore.rewards.answers import final_part, has_content, marked_answers, required_prefix
from rlcore.rewards.base import score_all, scored
from rlcore.rewards.grader_pool import GraderPool
from rlcore.types import Rollout, Score

MAX_REGEX_CHARACTERS = 100_000
_KINDS = {"boxed": "box", "answer_tag": "tag", "hashes": "hashes"}
_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Options of the reward ``format``.

    Attributes:
        style: One of ``docs/rewards.md``. The opening ``<think>`` may be missing, because chat templates prefill it.
        tags: Names in their order (``"plan, solution"``).
        pattern: Regular expression of the whole completion.
        example: Completion that matches ``pattern``, as the policy must write it.
    """

    style: Literal["boxed", "answer_tag", "hashes", "think_answer", "tags", "regex"]
    tags: str = ""
    pattern: str = ""
    example: str = ""
    timeout_seconds: Duration = 1.0

    def __post_init__(self) -> None:
        if (self.style == "tags") != bool(self.tags):
            raise ConfigError("tags (names in their order) are required by style 'tags', and only by it")
        bad = [name for name in self.tag_names if not _TAG_NAME.fullmatch(name)]
        if bad or len(set(self.tag_names)) != len(self.tag_names):
            raise ConfigError(f"tags = {self.tags!r}: must be different names of letters, separated by commas")
        if (self.style == "regex") != bool(self.pattern and self.example):
            raise ConfigError("pattern and a matching example are required by style 'regex', and only by it")
        if self.pattern:
            _check_pattern(self.pattern)

    @property
    def tag_names(self) -> tuple[str, ...]:
        if self.style == "think_answer":
            return ("think", "answer")
        return tuple(name.strip() for name in self.tags.split(",")) if self.tags else ()


class FormatReward:
    """1.0 for a completion in the format, else 0.0, also if matching the user's pattern times out."""

    name = "format"

    def __init__(self, options: FormatOptions, *, prefill: str = "") -> None:
        self._options, self._prefill = options, prefill
        self._pool = GraderPool("format", timeout_seconds=options.timeout_seconds, num_workers=1)
        if options.style == "regex":
            self._require_example(prefill.strip())

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if self._options.style == "regex":
            return score_all([self._prepare(rollout.text) for rollout in rollouts], self._pool, self._score)
        return [self._score(has_format(rollout.text, self._options, prefill=self._prefill)) for rollout in rollouts]

    def known(self) -> tuple[str, tuple[str, ...]]:
        """Return a completion in the format and some that are not; for a pattern no counterexample is known."""
        options, end = self._options, required_prefix(self._prefill)
        if options.style == "regex":
            return options.example, ()
        if options.tag_names:
            return "".join(f"<{name}>7</{name}>" for name in options.tag_names), ("", "7")
        marked = {"boxed": r"\boxed{7}", "answer_tag": "<answer>7</answer>", "hashes": "\n#### 7"}[options.style]
        return end + marked, ("", f"{end}7")

    def close(self) -> None:
        self._pool.close()

    def _prepare(self, text: str) -> Score | dict[str, str]:
        if len(text) > MAX_REGEX_CHARACTERS:
            return scored(self.name, 0.0)
        return {"pattern": self._options.pattern, "text": text}

    def _score(self, fits: Any) -> Score:
        return scored(self.name, float(fits))

    def _require_example(self, prefill: str) -> None:
        if prefill and self._options.example.startswith(prefill):
            raise ConfigError(
                f"the chat template writes {prefill!r} itself, so no completion begins with it or matches",
                where=f"example = {self._options.example!r}",
                fix="remove it from the example and the pattern, or set another model.chat_template",
            )
        (outcome,) = self._pool.grade_all([{"pattern": self._options.pattern, "text": self._options.example}])
        if outcome.value is not True:
            self.close()
            reason = outcome.error or "the pattern does not match the whole example"
            raise ConfigError(reason, where=f"pattern = {self._options.pattern!r}", fix="correct one of the two")


def has_format(text: str, options: FormatOptions, *, prefill: str = "") -> bool:
    """Return True if ``text`` is in the format (any style but ``regex``, see :class:`FormatOptions`)."""
    if options.tag_names:
        return _is_tagged(text.strip(), options.tag_names)
    part = final_part(prefill + text)
    if part is None:
        return False
    marked = [marked for marked in marked_answers(part) if marked.kind == _KINDS[options.style]]
    return len(marked) == 1 and has_content(part[slice(*marked[0].inner)])


def _is_tagged(text: str, names: Sequence[str]) -> bool:
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    for index, name in enumerate(names):
        if index and not text.startswith(f"<{name}>"):
            return False
        inside, closed, text = text.removeprefix(f"<{name}>").partition(f"</{name}>")
        if not closed or not has_content(inside) or any(tag in inside for tag in tags):
            return False
        text = text.strip()
    return not text


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"pattern = {pattern!r} is not a regular expression: {error}") from error
