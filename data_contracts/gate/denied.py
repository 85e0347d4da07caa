"""Prompts of erased rows: the gate drops every row with one, so that an erased row does not come back.

The caller gives keyed digests. No text of an erased row is needed or kept.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.data_contracts.errors import LEFT_OUT
from rlcore.data_contracts.text import prompt_hash

DIGITS = 16
"""Hexadecimal digits of a prompt's hash that count: 64 bits distinguish prompts."""
ERASED = f"{LEFT_OUT}erased on request"


@dataclass(frozen=True, kw_only=True)
class DeniedPrompts:
    """Digests (HMAC-SHA256) of the first ``DIGITS`` digits of prompts' hashes, and their key."""

    key: bytes = b""
    digests: frozenset[str] = frozenset()

    def digest_of(self, prompt: str) -> str:
        """Return the keyed digest of a prompt's hash."""
        return hmac.new(self.key, prompt[:DIGITS].encode(), hashlib.sha256).hexdigest()

    def has(self, messages: Sequence[Mapping[str, str]]) -> bool:
        """Return True if rows with this conversation were erased."""
        return bool(self.digests) and self.digest_of(prompt_hash(messages)) in self.digests


NONE_DENIED = DeniedPrompts()
