"""Presets of strangers: each ends with a message that names the file or the key, never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.cli.app import main
from rlcore.flows.presets import FOLDER, open_preset

TINY = (FOLDER / "tiny.toml").read_bytes()
REFUSED = {
    "nothing in it": b"",
    "UTF-16": TINY.decode().encode("utf-16"),
    "a NUL at the end": TINY + b"\0",
    "JSON": b'{"name": "x"}',
    "brackets without end": b"x = " + b"[" * 3_000 + b"]" * 3_000,
    "an integer of 6,000 digits": b'extends = "tiny"\nseed = ' + b"9" * 6_000,
    "a weight that no float holds": b'extends = "tiny"\n[stages.grpo]\nlearning_rate = ' + b"9" * 400,
    "a base that is a date": b"extends = 2026-01-01",
    "a base with a NUL": b'extends = "tiny\\u0000"',
    "a base with 5,000 letters": b'extends = "' + b"x" * 5_000 + b'"',
    "a base in another folder": b'extends = "../tiny"',
    "itself": b'extends = "preset"',
    "without, a text": b'extends = "tiny"\nwithout = "stages.ppo"',
    "without, numbers": b'extends = "tiny"\nwithout = [1]',
    "without, below a value": b'extends = "tiny"\nwithout = ["name.x"]',
    "requires, a number": b'extends = "tiny"\nrequires = 7',
    "requires, dates": b'extends = "tiny"\nrequires = [2026-01-01]',
    "stages, a list": b'extends = "tiny"\n[[stages.grpo]]\nname = "x"',
    "data, a date": b'extends = "tiny"\ndata = 2026-01-01',
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_strange_preset_is_refused_with_its_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "preset.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        open_preset(str(path))
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "preset.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TINY.replace(b"\n", b"\r\n"))
    assert open_preset(str(path)) == open_preset("tiny")


@pytest.mark.parametrize("name", ["x" * 5_000, "x" * 5_000 + ".toml", "a\0.toml", "", "."])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such preset or file"):
        open_preset(name)


@pytest.mark.parametrize("override", ["seed=" + "9" * 6_000, "seed=" + "[" * 3_000, "without=1", "requires=1"])
def test_a_strange_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        open_preset("tiny", [override])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[data.prompts]\nadapter = "prompts"\npath = "' + "a" * 5_000 + '"', "File name too long"),
        ('[engine]\nkind = "vllm"\nurls = ["http://[::1"]', "engine.urls"),
        ('[engine]\nkind = "vllm"\nurls = ["http://localhost:port"]', "engine.urls"),
    ],
)
def test_the_plan_names_what_cannot_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    path = tmp_path / "preset.toml"
    path.write_text(f'extends = "tiny"\n{text}\n', encoding="utf-8")
    assert main(["plan", str(path)]) != 0
    assert named in capsys.readouterr().err


def test_a_message_holds_no_codes_of_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "preset.toml"
    path.write_text('extends = "tiny"\nname = "\\u001b[31mred\\u202e"\n', encoding="utf-8")
    assert main(["plan", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[31mred" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
