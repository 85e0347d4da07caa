"""The command line as a user meets it: help, usage errors, one parser behind three ways in, and a quick start."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, DataError
from rlcore.extras import describe_installation, install_command
from rlcore.flows.cli.app import app, main
from rlcore.flows.cli.parameters import split_overrides

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = sorted(name for name in app if not name.startswith("-"))


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in output] == []
    assert "RLCORE_HOME" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_says_what_it_does_and_gives_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert f" rlcore {command}" in capsys.readouterr().out.partition(f"Usage: rlcore {command}")[2]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["rnu"], ("rnu", "run")),
        (["run", "--prest", "tiny"], ("--prest", "--preset")),
        (["rollback", "tiny-grpo/1"], ("--reason",)),
        (["rollback", "tiny-grpo", "three", "--reason", "x"], ("three",)),
        (["rollback", "tiny-grpo", "3", "--reason", "x"], ("unexpected: 3", "name/3")),
        (["ui", "--mlflow-port", "high"], ("--mlflow-port", "high")),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_error(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("error (usage): ") == 1
    assert [part for part in parts if part not in error] == []
    assert "--help" in error


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no such key"), 2), (DataError("no such row"), 1)])
def test_an_error_of_ours_is_its_message_and_its_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("rlcore.flows.cli.inspection.open_home", fail)
    assert main(["ui"]) == code
    assert capsys.readouterr().err == f"\nerror ({type(error).__name__}): {error}\n"


@pytest.mark.parametrize("arguments", [["config", "tiny"], ["show", "tiny"]])
def test_a_command_whose_output_nobody_reads_ends_silently(tmp_path: Path, arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "rlcore.flows", *arguments]
    variables = {**os.environ, "RLCORE_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=variables, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_console_script_is_the_module_that_python_runs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts["rlcore"] == "rlcore.flows.__main__:main"


DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NOT_A_WORD = {"|", ">", "&&", ";", "2>&1"}


def documented(path: Path) -> list[list[str]]:
    """The arguments of each ``rlcore ...`` in the shell blocks of a document, and in its text as code."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(rlcore [^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"(\w+=\S* )*rlcore ", line)]
    return [list(takewhile(lambda word: word not in NOT_A_WORD, each[each.index("rlcore") + 1 :])) for each in words]


def test_every_command_of_a_document_is_one_that_the_parser_takes() -> None:
    for words in (words for path in DOCUMENTS for words in documented(path)):
        if "…" not in words and words[0] in COMMANDS and len(words) > 1:  # a command alone is its name
            app.parse_args(words, exit_on_error=False, print_error=False)
        assert words[0] in COMMANDS or words[0].startswith("--"), words


OWN = """
import sys
from rlcore.flows.cli.app import main
sys.argv = ["rlcore", "--version"]
main()
import own_rewards, tasks
print(own_rewards.__file__, tasks.__file__)
"""


def test_the_console_script_finds_modules_of_the_current_folder_whatever_their_names(tmp_path: Path) -> None:
    mine = [tmp_path / f"{name}.py" for name in ("own_rewards", "tasks")]
    for path in mine:
        path.write_text("")
    command = [sys.executable, "-P", "-c", OWN]  # -P: as a script, without the current folder
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=plain, check=True)
    assert done.stdout.split()[-2:] == [str(path) for path in mine]


def test_no_module_of_a_user_hides_ours(tmp_path: Path) -> None:
    for name in ("tasks", "flows", "data_contracts", "examples", "infra", "benchmarks", "tests"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not ours')")
    variables = os.environ | {"PYTHONPATH": str(tmp_path), "RLCORE_HOME": str(tmp_path / "home")}
    line = [sys.executable, "-m", "rlcore.flows", "config", "tiny"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=variables, check=False)
    assert done.returncode == 0, done.stderr


MEASURE = """
import json, sys
from rlcore.flows.cli.app import main
code = main(["--help"])
heavy = {"torch", "transformers", "prefect", "mlflow", "pandas", "pandera", "matplotlib", "scipy"} & set(sys.modules)
print(json.dumps({"code": code, "modules": len(sys.modules), "heavy": sorted(heavy)}))
"""


def test_help_brings_in_few_modules_and_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, cwd=ROOT, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert (measured["code"], measured["heavy"]) == (0, [])
    assert measured["modules"] < 600  # 431 take 0.4 s of the processor


def made(tmp_path: Path, *arguments: str) -> list[str]:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "-o", "setup", f"BIN={python.parent}", *arguments]
    outer = ("MAKE", "PRESET", "SET")  # of the make that runs the tests
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean, check=True)
    given: list[str] = json.loads(done.stdout)
    return given


def test_make_hands_paths_with_blanks_and_values_with_quotes_on_as_they_are(tmp_path: Path) -> None:
    override = "data.prompts.path=my rows.jsonl stages.grpo.rewards=[{kind='math', weight=1.0}]"
    given = made(tmp_path, "demo", "PRESET=my folder/it's.toml", f"SET={override}")
    assert given == ["-m", "rlcore.flows", "run", "--preset", "my folder/it's.toml", "--set", override]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("demo",), ["run", "--preset", "tiny", "--set", ""]),
        (("ui", "MLFLOW_PORT=5001"), ["ui", "--mlflow-port", "5001", "--prefect-port", "4200"]),
    ],
)
def test_make_is_the_same_commands(tmp_path: Path, arguments: tuple[str, ...], given: list[str]) -> None:
    assert made(tmp_path, *arguments) == ["-m", "rlcore.flows", *given]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ()),
        ("seed=1", ("seed=1",)),
        ("  seed=1   name=x  ", ("seed=1", "name=x")),
        ("data.prompts.path=my rows.jsonl seed=1", ("data.prompts.path=my rows.jsonl", "seed=1")),
        ("a.rewards=[{kind='math', weight=1.0}] seed=1", ("a.rewards=[{kind='math', weight=1.0}]", "seed=1")),
        ("a.options={ x=1, y = 2 }", ("a.options={ x=1, y = 2 }",)),
        ('name="x y=1" seed=1', ('name="x y=1"', "seed=1")),
        (r'name="a \" b=1" seed=1', (r'name="a \" b=1"', "seed=1")),
        ("name='b=] c=1' seed=1", ("name='b=] c=1'", "seed=1")),
        ("name=it's here seed=1", ("name=it's here", "seed=1")),
        ("a=b == c", ("a=b == c",)),
        ("nonsense", ("nonsense",)),
    ],
)
def test_a_blank_parts_two_overrides_where_a_key_follows(text: str, overrides: tuple[str, ...]) -> None:
    assert split_overrides(text) == overrides


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from rlcore.flows.__main__ import main
sys.exit(main())
"""


def command_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", WITHOUT, missing, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("missing", "arguments"), [("cyclopts", ()), ("pandera", ("validate", "tiny"))])
def test_a_missing_package_of_the_pipeline_is_one_line_with_the_command_that_installs_it(
    missing: str, arguments: tuple[str, ...]
) -> None:
    done = command_without(missing, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f" lacks {missing} of the extra pipeline: {install_command('pipeline')}" in line


def test_the_version_is_there_without_the_pipeline() -> None:
    assert command_without("cyclopts", "--version").stdout == f"{describe_installation()}\n"


def test_another_missing_package_is_no_matter_of_the_pipeline() -> None:
    assert "ModuleNotFoundError" in command_without("rlcore.flows.cli.app").stderr
