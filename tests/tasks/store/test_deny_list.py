"""The list of erased rows: repetition, damage, and its part in the keys of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.data_contracts.text import prompt_hash
from rlcore.errors import StorageError
from rlcore.tasks.store.deny_list import deny, deny_list_digest, deny_list_path, read_denied
from rlcore.tasks.store.settings import Home

ASKED = [{"role": "user", "content": "Where does Zoë live?"}]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_home_without_erasures_has_no_list_and_no_digest_for_keys(home: Home) -> None:
    assert deny_list_digest(home) == {}
    assert not read_denied(home).has(ASKED)


def test_a_denied_prompt_is_found_and_not_written(home: Home) -> None:
    deny(home, [prompt_hash(ASKED)])
    assert read_denied(home).has(ASKED)
    content = deny_list_path(home).read_text(encoding="utf-8")
    assert "live" not in content
    assert prompt_hash(ASKED)[:16] not in content


def test_denying_again_changes_nothing_and_another_prompt_changes_the_digest(home: Home) -> None:
    digests = deny(home, [prompt_hash(ASKED)])
    before = deny_list_digest(home)
    assert (deny(home, [prompt_hash(ASKED)]), deny_list_digest(home)) == (digests, before)
    deny(home, ["0" * 64])
    assert deny_list_digest(home) != before
    assert read_denied(home).has(ASKED)


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", '{"key": "zz"}\n'])
def test_a_damaged_list_is_an_error_and_lets_no_erased_row_pass(content: str, home: Home) -> None:
    deny_list_path(home).write_text(content, encoding="utf-8")
    with pytest.raises(StorageError, match="erased rows is damaged"):
        read_denied(home)
