"""Own rows without references: rewards that need none just work, and no accuracy is told where none can be known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.flows import promote
from rlcore.flows.plan import every_target, plan_run
from rlcore.flows.presets import open_preset
from rlcore.flows.run import run_targets
from rlcore.flows.stages import stages
from rlcore.tasks.keys.cache_keys import key_of
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, read_table

PRESET = """
extends = "r1_zero"
name = "talk"
without = ["stages.grpo"]

[data.prompts]
adapter = "prompts"
path = "{path}"
num_train = 24
num_eval = 8

[stages.brief]
kind = "rl"
init_from = "base"
prompts = {{ prompts = 1.0 }}
algorithm = "grpo"
num_iterations = 2
prompts_per_iteration = 4
group_size = 4
learning_rate = 1e-4
rewards = [{{ kind = "my_taste:taste", files = ["{words}"] }}]
eval_every = 1
sampling = {{ max_new_tokens = 12 }}

[model.shape]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
intermediate_size = 32

[evaluation]
num_problems = 8
num_samples = 2
max_new_tokens = 12
"""
TASTE = """
from pathlib import Path

import my_words

WORDS = Path(__file__).with_name("words.txt")


def taste(rollouts):
    return [my_words.share(rollout.text, WORDS.read_text()) for rollout in rollouts]
"""
WORDS = "def share(text, liked):\n    return sum(letter in liked for letter in text) / max(1, len(text))\n"


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    asked = [[{"role": "user", "content": f"Tell me of {number}."}] for number in range(80)]
    rows = [{"prompt_id": f"p{n}", "messages": each, "reference": "", "task": "talk"} for n, each in enumerate(asked)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.txt").write_text("aeiou")
    (tmp_path / "my_taste.py").write_text(TASTE)
    (tmp_path / "my_words.py").write_text(WORDS)
    (tmp_path / "talk.toml").write_text(PRESET.format(path=tmp_path / "rows.jsonl", words=tmp_path / "words.txt"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_taste", "my_words"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(tmp_path / "talk.toml")


def test_rewards_work_without_references_and_no_accuracy_is_reported(tracked_home: Home, preset: str) -> None:
    targets = every_target(preset, ())
    assert "evaluation: no accuracy on prompts, whose rows have no references" in plan_run(preset, (), targets).lines
    refs = run_targets(preset, (), targets)
    made = {name: tracked_home.root / ref.uri for name, ref in refs.items()}
    for name in ("base", "brief"):
        summary = read_json(made[f"evaluate_{name}"] / "summary.json")
        assert not [key for key in summary if "accuracy" in key or "pass" in key]
        assert (summary["eval/no_reference"], summary["eval/problems"]) == (8, 0)
        answers = read_table(made[f"evaluate_{name}"] / "answers.parquet")
        assert len(answers) == 8 + 8 * 2
        assert not answers["is_graded"].any()
    history = read_json(made["brief"] / "history.json")
    assert len(history) == 2
    assert not [key for row in history for key in row if key.startswith("eval/")]
    page = page_folder(tracked_home, "talk", "compare", refs["compare"]) / "comparison.md"
    assert "| brief | not measured: no references |" in page.read_text()
    reports = [report.read_text() for report in tracked_home.root.rglob("report*.html")]
    assert any("accuracy is not measured: none of the 8 held-out prompts has a reference" in each for each in reports)


def test_a_promotion_without_references_is_refused_before_work(tracked_home: Home, preset: str) -> None:
    with pytest.raises(ConfigError, match="promotion: is decided by accuracy"):
        promote.fn(preset, ["promotion={challenger='brief'}"])
    assert not list(tracked_home.artifacts.rglob("*.json"))


@pytest.mark.parametrize(
    ("file", "text"), [("my_words.py", WORDS.replace("max(1,", "max(2,")), ("words.txt", "aeiouy")]
)
def test_a_helper_or_a_data_file_of_a_users_reward_runs_its_stage_again_and_no_other(
    home: Home, preset: str, file: str, text: str
) -> None:
    config = open_preset(preset)

    def keys() -> dict[str, str]:
        return {stage.name: key_of(key_inputs(stage, config, {})) for stage in stages(config)}

    before = keys()
    path = Path(preset).with_name(file)
    path.write_text(text)
    after = keys()
    assert {name for name in before if before[name] != after[name]} == {"brief"}


def test_words_beside_the_code_of_a_users_helper_run_nothing_again(home: Home, preset: str) -> None:
    config = open_preset(preset)
    (brief,) = (stage for stage in stages(config) if stage.name == "brief")
    before = key_of(key_inputs(brief, config, {}))
    Path(preset).with_name("my_words.py").write_text('"""Words."""\n' + WORDS + "# a comment\n")
    assert key_of(key_inputs(brief, config, {})) == before
