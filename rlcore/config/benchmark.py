"""Settings of a benchmark: tasks of the language model evaluation harness, from custom files."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeInt, PositiveInt
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Tasks, each a file ``<task>.yaml`` in ``folder``, with its data as JSONL files in the same folder.

    ``chat``: use the model's chat template; if false, send prompts as plain text. ``max_new_tokens``: length limit of
    tasks that set none.
    """

    folder: str
    tasks: tuple[str, ...]
    chat: bool = True
    limit: NonNegativeInt = 0  # documents per task; 0: all
    max_new_tokens: PositiveInt = 256
    max_concurrent: PositiveInt = 64
    tokens_per_microbatch: PositiveInt = 8192

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks is empty", fix="list the files of the folder, without .yaml")
        for name in self.tasks:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ConfigError(f"tasks: {name!r} is not the name of a file without .yaml")
