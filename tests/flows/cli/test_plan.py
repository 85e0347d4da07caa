"""``rlcore plan`` on presets with many faults: all of them at once, each with its full key, and nothing is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.flows.cli.app import main
from rlcore.models.importing import import_model
from rlcore.tasks.store.settings import Home

SHAPE = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8, max_positions=256)
PRESET = """extends = "chat"
name = "mine"
[hardware]
device = "cuda"
[model]
{model}
license = "MIT"
chat_template = "none.jinja"
[data.prompts]
adapter = "gsm8k"
path = "rows.jsonl"
eval_path = "held out.jsonl"
max_tokens = 200
options = {{ share = 0.5 }}
[data.others]
contract = "prompts"
adapter = "gsm8k"
path = "rows.jsonl"
eval_path = "none.jsonl"
num_train = 2
num_eval = 2
max_tokens = 999
[stages.grpo]
group_size = 1
learning_rate = 5.0
prompts_per_iteration = 100000
sampling.max_new_tokens = 100
rewards = [
  {{ kind = "maths" }},
  {{ kind = "math", options = {{ last = true }} }},
  {{ kind = "own_rewards:long" }},
  {{ kind = "no_such_module:f" }},
]
[stages.more]
kind = "rl"
init_from = "grop"
prompts = {{ prompts = 1.0 }}
algorithm = "dr_grpo"
num_iterations = 1
prompts_per_iteration = 1
group_size = 2
learning_rate = 1e-6
rewards = []
sampling = {{ max_new_tokens = 8 }}
[evaluation]
max_new_tokens = 120
"""
FOLDER = 'source = "folder"\npath = "model"'
HUB = 'source = "hub"\npath = "org/name"'
SIZES = ("disk", "data.others.max_tokens", "stages.grpo.sampling.max_new_tokens", "evaluation.max_new_tokens")
EVERYWHERE = (
    "stages.more.init_from",
    "stages.more.rewards",
    "model.chat_template",
    "hardware.device",
    "stages.grpo.group_size",
    "stages.grpo.rewards.0.kind",
    "stages.grpo.rewards.1.options.last",
    "stages.grpo.rewards.2.kind",
    "stages.grpo.rewards.3.kind",
    "data.prompts.options",
    "data.others.eval_path",
)
UNUSUAL = (
    "stages.grpo.learning_rate",
    "stages.grpo.prompts_per_iteration",
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder: a model of 256 positions, rows, and a module without the function that is named."""
    import_model(ModelConfig(source="scratch", shape=SHAPE), tmp_path / "model", seed=0)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    (tmp_path / "own_rewards.py").write_text("def short(rollouts):\n    return [1.0 for _ in rollouts]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


def lines_of(error: str) -> list[str]:
    return [line.strip() for line in error.splitlines() if line.startswith("    ")]


def key_of(line: str) -> str:
    return line.removeprefix("warning: ").split()[0].rstrip(":")


@pytest.mark.parametrize(
    ("model", "known"), [(FOLDER, SIZES), (HUB, ("model.revision",))], ids=["of a folder", "of a hub"]
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_every_fault_of_a_preset_is_named_at_once_with_its_full_key(
    project: Path, home: Home, capsys: pytest.CaptureFixture[str], command: str, model: str, known: tuple[str, ...]
) -> None:
    (project / "mine.toml").write_text(PRESET.format(model=model))
    assert main([command, "mine.toml"]) == 2
    said = capsys.readouterr()
    lines = lines_of(said.err)
    assert sorted(map(key_of, lines)) == sorted((*EVERYWHERE, *known, *UNUSUAL))
    assert [key_of(line) for line in lines if line.startswith("warning: ")] == list(UNUSUAL)
    (held_out,) = [line for line in lines if line.startswith("data.others.eval_path")]
    assert held_out.startswith("data.others.eval_path = 'none.jsonl': no such file")
    assert "nothing was run" in said.err
    assert not said.out
    assert not list(home.cache.glob("*/*.json"))


@pytest.mark.parametrize("command", ["plan", "run"])
def test_held_out_rows_that_are_not_there_are_named_by_their_key_and_path(
    project: Path, home: Home, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    override = ("--set", "data.prompts.eval_path=elsewhere/test.jsonl")
    text = f'extends = "chat"\nname = "mine"\n[model]\n{FOLDER}\nlicense = "MIT"\n[data.prompts]\nadapter = "gsm8k"\n'
    text += 'path = "rows.jsonl"\nmax_tokens = 99\n[stages.grpo]\nsampling.max_new_tokens = 8\n'
    (project / "mine.toml").write_text(text + "[evaluation]\nmax_new_tokens = 8\n")
    assert main([command, "mine.toml", *override]) == 2
    line, *others = lines_of(capsys.readouterr().err)
    assert others == []
    assert line.startswith("data.prompts.eval_path = 'elsewhere/test.jsonl': no such file")
