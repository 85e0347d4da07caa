"""Settings of a benchmark: tasks of the language model evaluation harness, from files of one's own."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeInt, PositiveInt
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """``tasks``, each a file ``<task>.yaml`` of ``folder``, whose data are JSONL files beside it.

    ``chat``: a question is asked in the model's chat template; without it, as plain text. ``max_new_tokens``: of an
    answer, where the task does not say.
    """

    folder: str
    tasks: tuple[str, ...]
    chat: bool = True
    limit: NonNegativeInt = 0  # documents of each task; 0: all
    max_new_tokens: PositiveInt = 256
    max_concurrent: PositiveInt = 64
    tokens_per_microbatch: PositiveInt = 8192

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks names no task", fix="name the files of the folder, without .yaml")
        for name in self.tasks:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ConfigError(f"tasks: {name!r} is not the name of a file without .yaml")
