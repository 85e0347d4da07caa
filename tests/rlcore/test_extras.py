"""Messages name a command that installs an extra, for every origin of the installation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rlcore import extras
from rlcore.extras import describe_installation, engine_command, install_command, make_command, requirements

ROOT = Path(__file__).resolve().parents[2]
METADATA = """Metadata-Version: 2.4
Name: rlcore
Version: 9.9
Requires-Dist: torch>=2.11
Requires-Dist: only-elsewhere; sys_platform == "none"
Provides-Extra: gguf
Requires-Dist: gguf>=0.19; extra == "gguf"
Requires-Dist: accelerate>=1; extra == "gguf"
Requires-Dist: only-there; sys_platform == "none" and extra == "gguf"
Provides-Extra: lora
Requires-Dist: peft>=0.18; extra == "lora"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed distribution that comes first on the path."""
    folder = tmp_path / "site" / "rlcore-9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def words(*names: str) -> list[str]:
    return shlex.split(install_command(*names))


def test_the_command_names_the_origin_of_the_installation(installed: Path, tmp_path: Path) -> None:
    wheel, checkout = tmp_path / "my wheels" / "rlcore-9.9-py3-none-any.whl", tmp_path / "clone"
    wheel.parent.mkdir()
    wheel.touch()
    checkout.mkdir()
    git = {"vcs_info": {"vcs": "git", "commit_id": "abc"}}
    cases = (
        ({"url": wheel.as_uri(), "archive_info": {}}, [f"{wheel}[gguf,lora]"]),
        ({"url": checkout.as_uri(), "dir_info": {}}, [f"{checkout}[gguf,lora]"]),
        ({"url": checkout.as_uri(), "dir_info": {"editable": True}}, ["--editable", f"{checkout}[gguf,lora]"]),
        ({"url": "https://h.invalid/r.git", **git}, ["rlcore[gguf,lora] @ git+https://h.invalid/r.git@abc"]),
        ({"url": "https://h.invalid/r.whl", "archive_info": {}}, ["rlcore[gguf,lora] @ https://h.invalid/r.whl"]),
        ({"url": (tmp_path / "gone.whl").as_uri()}, ["gguf>=0.19", "accelerate>=1", "peft>=0.18"]),
    )
    assert words("lora") == ["pip", "install", "rlcore[lora]"]  # no record: from an index
    for origin, wanted in cases:
        (installed / "direct_url.json").write_text(json.dumps(origin))
        assert words("gguf", "lora") == ["pip", "install", *wanted]


def test_requirements_are_those_of_this_platform_for_the_library_or_an_extra(installed: Path) -> None:
    assert [str(each.name) for each in requirements()] == ["torch"]
    assert [str(each.name) for each in requirements("gguf")] == ["gguf", "accelerate"]
    assert extras.extra_names() == ("gguf", "lora")
    assert describe_installation() == f"9.9 ({ROOT / 'rlcore'})"


def test_make_is_named_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert make_command("setup") == "make setup"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(make_command("setup")) == ["make", "-C", str(ROOT), "setup"]
    assert engine_command() == make_command("engine")

    monkeypatch.setattr(extras, "_FOLDER", tmp_path / "site-packages" / "rlcore")
    assert make_command("setup") == ""
    lock = (ROOT / "infra" / "locks" / "engine.txt").read_text(encoding="utf-8")
    assert f"\n{engine_command().split()[-1]} " in lock


def test_no_message_names_a_package_that_an_index_does_not_have() -> None:
    sources = [path for folder in ("rlcore", "tasks", "flows", "infra") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in sources if re.search(r"pip install.{0,4}rlcore", path.read_text("utf-8"))] == []
