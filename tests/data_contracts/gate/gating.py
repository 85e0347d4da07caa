"""The gate over rows in contract columns, and a tokenizer that counts words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rlcore.data_contracts.adapters.convert import stream_of
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.adapters.table import CONTRACTS
from rlcore.data_contracts.gate import data_gate
from rlcore.data_contracts.gate.data_gate import GateLimits
from rlcore.data_contracts.gate.reading import Source, source_of
from rlcore.data_contracts.gate.records import Quarantined
from rlcore.data_contracts.gate.report import GateReport
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter


def prompt_lengths(conversations: Sequence[Messages]) -> list[int]:
    """Two tokens for the template, and one a word."""
    return [2 + sum(len(turn["content"].split()) for turn in messages) for messages in conversations]


METER = TokenMeter(
    encode=lambda texts: [[hash(word) for word in text.split()] for text in texts],
    prompt_lengths=prompt_lengths,
    max_prompt_tokens=prompt_lengths,
    max_text_tokens=lambda text: len(text.split()) + 1,
    special_tokens=("<|end|>", "<|pad|>"),
)
LIMITS: Mapping[str, Any] = {"num_train": 100, "num_eval": 100, "max_tokens": 8, "max_quarantined": 0.5}


@dataclass(frozen=True)
class Gated:
    """Result of the gate; ``kept`` is empty if it refuses."""

    kept: pd.DataFrame
    quarantine: tuple[Quarantined, ...]
    report: GateReport


def gate_rows(rows: Sequence[dict[str, Any]], kind: Kind = "preferences", **limits: Any) -> Gated:
    """The gate over rows of a source named ``test``, the first of which is in line 1."""
    return gate_source(source_of("test", rows), kind, **limits)


def gate_source(source: Source, kind: Kind, *, meter: TokenMeter = METER, make: Any = None, **limits: Any) -> Gated:
    frames: list[pd.DataFrame] = []
    stream = RowStream(source=source, make=make) if make else stream_of(source, kind, adapter=kind)
    gate_limits = GateLimits(**{**LIMITS, **limits})
    result = data_gate.check(stream, CONTRACTS[kind], gate_limits, meter=meter, sink=frames.append)
    kept = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(CONTRACTS[kind].columns))
    return Gated(kept=kept, quarantine=result.quarantine, report=result.report)
