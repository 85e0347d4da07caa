"""The audit log, signatures of approvers, passwords and prices."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, PromotionError, StorageError
from rlcore.tasks.promotion.approvers import sign, verify
from rlcore.tasks.store.audit_log import AuditEntry, audit_path, chain_errors, read_entries, record_action
from rlcore.tasks.store.passwords import draw, passwords, write_private
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.toml_files import Prices, kind_of_machine, prices_path, read_prices
from tests.ssh_keys import allowed, make_key


@pytest.fixture
def logged_home(tmp_path: Path) -> Home:
    logged_home = Home(tmp_path)
    for version in (1, 2, 3):
        record_action(logged_home, "promote", "tiny-grpo", {"to": version})
    return logged_home


def test_entries_follow_each_other(logged_home: Home) -> None:
    entries = read_entries(logged_home)
    assert [(each.number, each.details["to"]) for each in entries] == [(1, 1), (2, 2), (3, 3)]
    assert [each.previous for each in entries[1:]] == [each.digest for each in entries[:-1]]
    assert chain_errors(logged_home) == ()
    assert audit_path(logged_home).stat().st_mode & 0o777 == 0o600  # signatures and people's reasons


def test_a_repeated_act_adds_no_entry_and_another_subject_does(logged_home: Home) -> None:
    assert record_action(logged_home, "promote", "tiny-grpo", {"to": 3}).number == 3
    assert record_action(logged_home, "gc", "home", {"bytes": 1}).number == 4
    assert record_action(logged_home, "promote", "tiny-grpo", {"to": 3}).number == 3
    assert record_action(logged_home, "promote", "tiny-grpo", {"to": 1}).number == 5


def _reseal(lines: list[str]) -> list[str]:
    """Change an entry and give it the right digest."""
    values = {**json.loads(lines[1]), "action": "approve"}
    return [lines[0], json.dumps({**values, "digest": AuditEntry(**values).computed_digest()}), lines[2]]


TAMPERED: tuple[Callable[[list[str]], list[str]], ...] = (
    lambda lines: [lines[0], lines[1].replace('"promote"', '"approve"'), lines[2]],
    _reseal,
    lambda lines: lines[1:],
    lambda lines: [lines[0], lines[2]],
    lambda lines: [lines[1], lines[0], lines[2]],
    lambda lines: [*lines, lines[2]],
    lambda lines: [lines[0], "{}", lines[2]],
    lambda lines: [lines[0], lines[1].replace("{", '{"action": "approve", ', 1), lines[2]],  # JSON takes the last
    lambda lines: [lines[0], lines[1].replace(" ", "  ", 1), lines[2]],
    lambda lines: [lines[0], "[" * 100_000, lines[2]],
    lambda lines: [lines[0], lines[1].replace('{"to": 2}', "[]"), lines[2]],
)


def test_a_gap_or_an_edit_is_found(logged_home: Home) -> None:
    lines = audit_path(logged_home).read_text(encoding="utf-8").splitlines()
    for place, tamper in enumerate(TAMPERED):
        audit_path(logged_home).write_text("\n".join(tamper(lines)) + "\n", encoding="utf-8")
        assert chain_errors(logged_home), place


def test_a_line_that_a_kill_cut_off_is_replaced_by_the_next_entry(logged_home: Home) -> None:
    with audit_path(logged_home).open("a", encoding="utf-8") as file:
        file.write('{"number": 4, "ti')
    assert len(read_entries(logged_home)) == 3
    assert record_action(logged_home, "gc", "home", {}).number == 4
    assert chain_errors(logged_home) == ()


def test_a_damaged_log_is_not_continued(logged_home: Home) -> None:
    audit_path(logged_home).write_text("no entry\n", encoding="utf-8")
    with pytest.raises(StorageError, match="line 1: not an entry"):
        record_action(logged_home, "gc", "home", {})


TEXT = '{"decision":"approve","reason":"gut – très bien"}\n'


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path, "anna")


def test_a_signature_names_its_signer_and_fits_its_text_alone(key: Path, tmp_path: Path) -> None:
    signature, ben = sign(TEXT, key), make_key(tmp_path, "ben")
    both = f"{allowed(key)}\n{allowed(ben)}"
    signer = verify(TEXT, signature, both)
    assert signer.principal == "anna"
    assert signer.key.startswith("SHA256:")
    assert verify(TEXT, sign(TEXT, ben), both).principal == "ben"
    with pytest.raises(PromotionError, match="anna does not fit the document"):
        verify(TEXT.replace("approve", "reject"), signature, both)
    with pytest.raises(PromotionError, match="of no key among the approvers"):
        verify(TEXT, signature, allowed(ben))
    with pytest.raises(PromotionError, match="of no key among the approvers"):
        verify(TEXT, signature, "")


def test_a_signature_survives_a_form_that_changes_its_lines(key: Path) -> None:
    signature = sign(TEXT, key)
    for changed in (signature.replace("\n", " "), signature.replace("\n", "\r\n"), f"  {signature}\n\n"):
        assert verify(TEXT, changed, allowed(key)).principal == "anna"
    with pytest.raises(PromotionError, match="not a signature of ssh-keygen: 'anna'"):
        verify(TEXT, "anna", allowed(key))
    damaged = signature.replace("U1NIU0lH", "AAAAAAAA", 1)
    with pytest.raises(PromotionError):
        verify(TEXT, damaged, allowed(key))


def test_a_key_counts_as_long_as_it_is_allowed_and_for_what(key: Path) -> None:
    signature = sign(TEXT, key)
    until = allowed(key, options='valid-before="20200101"')
    with pytest.raises(PromotionError, match="expired"):
        verify(TEXT, signature, until)
    assert verify(TEXT, signature, until, at=datetime(2019, 5, 1, tzinfo=UTC)).principal == "anna"
    assert verify(TEXT, signature, allowed(key, options='namespaces="rlcore"')).principal == "anna"
    with pytest.raises(PromotionError):
        verify(TEXT, signature, allowed(key, options='namespaces="git"'))


def test_a_missing_key_or_program_is_an_error(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromotionError, match=r"the key does not sign: .*No such file") as caught:
        sign(TEXT, tmp_path / "nobody")
    assert caught.value.where == str(tmp_path / "nobody")
    signature = sign(TEXT, key)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PromotionError, match="ssh-keygen is not installed"):
        sign(TEXT, key)
    with pytest.raises(PromotionError, match="ssh-keygen is not installed") as missing:
        verify(TEXT, signature, allowed(key))
    assert "openssh-client" in missing.value.fix


def test_a_password_is_long_unlike_the_others_and_needs_no_quotes() -> None:
    drawn = {draw() for _ in range(100)}
    assert len(drawn) == 100
    assert all(re.fullmatch(r"[\w-]{32}", each, re.ASCII) for each in drawn)


def test_passwords_are_drawn_once_and_a_new_name_is_added_to_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "passwords.json"
    first = passwords(path, ("a", "b"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert passwords(path, ("a", "b")) == first
    assert passwords(path, ("b", "c")) == {**first, "c": passwords(path, ("c",))["c"]}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_private_from_the_start_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o666)
    write_private(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


GPU = {"device": "cuda", "gpu": "NVIDIA L4 (compute capability 8.9)"}
EXAMPLE = Path(__file__).parents[3] / "infra" / "prices.toml"


def test_a_machine_is_named_by_its_gpu_and_without_one_is_a_cpu() -> None:
    assert kind_of_machine(GPU) == "NVIDIA L4"
    assert kind_of_machine({"device": "cpu", "gpu": ""}) == kind_of_machine({}) == "cpu"


def test_the_committed_example_is_read_from_the_state_directory(home: Home) -> None:
    assert read_prices(home) == Prices()
    shutil.copy(EXAMPLE, prices_path(home))
    prices = read_prices(home)
    assert prices.of(GPU) == prices.per_hour["NVIDIA L4"]
    assert prices.of({"gpu": "another"}) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("per_hour = {cpu = -1.0}", "per_hour.cpu = -1.0: must be at least"),
        ("price = 1", "price: unknown key"),
        ("per_hour = [", "the price list is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(home: Home, text: str, words: str) -> None:
    prices_path(home).write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_prices(home)
    assert raised.value.where == str(prices_path(home))
