"""Signatures by real keys: who signed, and everything that is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlcore.errors import PromotionError
from rlcore.tasks.store.approvers import sign, verify
from tests.ssh_keys import allowed, make_key

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


def test_an_unusable_key_and_a_missing_program_are_named(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
