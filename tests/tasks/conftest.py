"""Set-up of the tests of several steps."""

from __future__ import annotations

import pytest

from rlcore.models.scratch import make_tokenizer
from rlcore.text.tokenization import ChatTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """That of a model made from nothing, as a checkpoint has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(max_positions=256).save_pretrained(folder)
    return ChatTokenizer.load(folder)
