"""The pages of docs/tutorials, followed with a small model in the place of SmolLM2 and of a large one.

Run as they stand: every Python file of a page, ``rlcore validate``, ``config`` and, over the finished micro run, what
the first page does with the demo. Planned: every preset of every page. Run with fewer and smaller iterations, marked
slow: ``rlcore run``; for agents in test_own_agent.py. Only parsed (tests/flows/cli/test_app.py): ``rlcore serve``,
``ui``. Nothing else of a page is tried: ``make``, ``rsync``, and a GPU.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.flows.cli.app import main
from rlcore.models.importing import import_model
from rlcore.tasks.store.settings import Home
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

FOLDER = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)```", re.DOTALL)
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=2048)
SMALL_MODEL = ("model.source=folder", "model.path=model", "model.license=MIT")
ROOM = "data.prompts.max_tokens=512"  # the small model has a token per character
SMALL_RUN = (
    "stages.grpo.num_iterations=2",
    "stages.grpo.prompts_per_iteration=2",
    "evaluation.num_problems=4",
    "evaluation.num_monitor_problems=2",
    "hardware.num_threads=1",
)
ON_A_GPU = "gpu.toml"  # whose plan on a CPU says what is missing


@dataclass(frozen=True, kw_only=True)
class Page:
    """A tutorial: its files by their names, the commands of ``rlcore`` in its shell blocks, and what it says it prints.

    ``printed``: the blocks without a language.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    printed: tuple[str, ...]


def page_of(name: str) -> Page:
    blocks = BLOCK.findall((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    lines = [
        shlex.split(line, comments=True) for kind, _, text in blocks if kind == "bash" for line in text.splitlines()
    ]
    return Page(
        files={title: text for _, title, text in blocks if title},
        commands=tuple(tuple(words[1:]) for words in lines if words and words[0] == "rlcore"),
        printed=tuple(text for kind, _, text in blocks if not kind),
    )


PAGES = {path.stem: page_of(path.stem) for path in sorted(FOLDER.glob("*.md"))}
COMMANDS = [(name, command) for name, page in PAGES.items() for command in page.commands if name != "first-run"]


def with_overrides(command: tuple[str, ...], overrides: tuple[str, ...]) -> list[str]:
    return [*command, *(part for override in overrides for part in ("--set", override))]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for page in PAGES.values():
        for name, text in page.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "model", seed=0)
    (folder / "models").mkdir()
    (folder / "models" / "instruct").symlink_to(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for script in sorted(folder.glob("make_*.py")):
            runpy.run_path(str(script))
    return folder


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return project


def test_every_page_has_presets_or_a_script_to_follow_and_no_file_of_another_page() -> None:
    assert len(PAGES) == 7
    assert [name for name, page in PAGES.items() if not page.files or not page.commands] == []
    names = [name for page in PAGES.values() for name in page.files]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "command"), [each for each in COMMANDS if each[1][0] in ("validate", "plan")])
def test_a_page_is_planned_and_its_data_are_looked_at(
    name: str, command: tuple[str, ...], here: Path, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    if command[1] == ON_A_GPU:
        assert main(with_overrides(command, (ROOM,))) == 2
        lines = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
        errors = [line for line in lines if not line.startswith("warning:")]
        named = PAGES[name].printed[0].splitlines()
        assert len(errors) == len(named) and all(map(str.startswith, errors, named))
        command = (*command, "--set", "hardware.device=cpu engine.kind=native engine.python=''")
    assert main(with_overrides(command, () if name == "own-agent" else (*SMALL_MODEL, ROOM))) == 0
    output = capsys.readouterr().out
    if command == ("validate", "mine.toml"):
        assert "198 for training, 40 held out, 0 unused, 2 quarantined" in output
        assert "line 18, messages" in output and "there are messages, prompt_id, task\n" in output
    elif command[0] == "validate":
        assert "warning" not in output
    elif command == ("plan", "rlhf.toml"):
        assert "evaluation: no accuracy on prompts, whose rows have no references" in output
    elif command[0] == "plan":
        warnings = [line for line in output.splitlines() if "warning:" in line]
        known = ("a run leaves such rows out", "8 steps; is this intended?")  # of a judge of few pairs
        assert [line for line in warnings if not line.endswith(known)] == []


def test_the_reward_is_called_and_pays_what_the_page_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("try_reward.py")
    assert f"It prints `{capsys.readouterr().out.strip()}`." in (FOLDER / "own-reward.md").read_text(encoding="utf-8")


def test_the_environment_is_played_and_its_tool_and_reward_do_what_the_page_says(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runpy.run_path("environment.py")
    assert capsys.readouterr().out.startswith("2 iterations, reward ")
    price, error = made["PriceTool"]()([" pear ", "fish"])
    assert (price.text, price.is_error) == ("4", False)
    assert (error.text, error.is_error) == ("error: no price for 'fish'", True)


@pytest.mark.slow
def test_the_demo_is_shown_changed_and_taken_along(
    micro_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page quotes the plan."""
    found = {command[0]: command for command in PAGES["first-run"].commands if command[0] != "run"}
    assert set(found) == {"doctor", "show", "ui", "plan", "config", "export"}
    for command in ("show", "plan"):
        done = run_warm(with_overrides(found[command], MICRO), environment(micro_home), ROOT)
        assert done.returncode == 0, done.stderr
        if command == "plan":
            states = dict(line.split()[:2] for line in done.stdout.splitlines())
            assert (states["sft"], states["grpo"]) == ("cached", "run")
    done = run_warm(found["export"], environment(micro_home), tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ask.py").write_text(PAGES["first-run"].files["ask.py"], encoding="utf-8")
    runpy.run_path("ask.py")
    assert main(list(found["config"])) == 0
    assert "coefficient = 0.005" in capsys.readouterr().out


@pytest.mark.slow  # half a minute for all
@pytest.mark.parametrize("preset", ["mine.toml", "brief.toml", "tools.toml", "guessing.toml", "rlhf.toml", "ppo.toml"])
def test_the_run_of_a_page_ends_with_its_comparison(project: Path, tmp_path: Path, preset: str) -> None:
    overrides = (*SMALL_MODEL, *SMALL_RUN)
    if preset in ("mine.toml", "brief.toml"):
        overrides = (*overrides, "data.prompts.max_tokens=1024")  # a token of the small model is a byte
    if preset in ("rlhf.toml", "ppo.toml"):
        models = ("reward_model", "judge_model")
        overrides = (*overrides, *(f"stages.{model}.min_accuracy=0.0" for model in models))
    variables = environment(tmp_path)
    done = run_warm(with_overrides(("run", preset), overrides), variables, project)
    assert done.returncode == 0, done.stderr
    shown = run_warm(with_overrides(("show", preset), overrides), variables, project)
    assert "report " in shown.stdout and "not run yet" not in shown.stdout
