"""``rlcore from-trl``: the preset has the numbers of the TRL configuration, worked by hand, and passes ``plan``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.flows.cli.app import main
from rlcore.models.importing import import_model

COMMON = """model_name_or_path: model
dataset_name: data
max_length: 64
learning_rate: 1e-5
lr_scheduler_type: cosine
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
logging_steps: 1
output_dir: out
report_to: wandb
"""
GRPO = (
    COMMON.replace("max_length: 64\n", "")
    + """reward_funcs: [accuracy_reward, my_rewards.brief]
reward_weights: [1.0, 0.2]
num_generations: 4
num_iterations: 2
num_train_epochs: 2
max_completion_length: 16
warmup_ratio: 0.1
beta: 0.04
epsilon_high: 0.28
"""
)
REWARD = """def brief(rollouts):
    return [1.0 if len(rollout.text) < 9 else 0.0 for rollout in rollouts]
"""


def write_rows(folder: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, kept in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompt(split: str, number: int) -> dict[str, Any]:
    asked = [turn("user", f"{split}: {number} + {7 * number % 13} = ?")]
    return {"prompt_id": f"{split}-{number}", "messages": asked, "reference": str(number), "task": "sums"}


def demonstration(split: str, number: int) -> dict[str, Any]:
    row = prompt(split, number)
    return {"prompt_id": row["prompt_id"], "messages": [*row["messages"], turn("assistant", f"It is {number}.")]}


def pair(split: str, number: int) -> dict[str, Any]:
    row = prompt(split, number)
    return {"prompt_id": row["prompt_id"], "prompt": row["messages"], "chosen": f"It is {number}.", "rejected": "No."}


ROWS = {"grpo": prompt, "sft": demonstration, "dpo": pair, "reward": pair}
SIZES = {"train": 100, "test": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    shape = ShapeConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96)
    import_model(ModelConfig(source="scratch", shape=shape, license="MIT"), folder, seed=0)
    return folder


@pytest.fixture
def project(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


def converted(project: Path, trainer: str, config: str) -> dict[str, Any]:
    """The preset that the command writes for a TRL file; its plan finds no error."""
    row = ROWS[trainer]
    write_rows(project / "data", {split: [row(split, i) for i in range(n)] for split, n in SIZES.items()})
    (project / f"{trainer}.yaml").write_text(config)
    assert main(["from-trl", f"{trainer}.yaml", "--trainer", trainer]) == 0
    assert main(["plan", f"{trainer}.toml"]) == 0
    return tomllib.loads((project / f"{trainer}.toml").read_text())


def test_a_grpo_configuration_becomes_a_preset_with_the_same_numbers(project: Path) -> None:
    preset = converted(project, "grpo", GRPO)
    found = preset["stages"]["grpo"]
    # A batch of 8 x 2 = 16 completions is 4 prompts of 4. 100 prompts are 25 batches a pass, 50 in two passes.
    assert (found["prompts_per_iteration"], found["group_size"], found["num_iterations"]) == (4, 4, 50)
    # Each batch is trained on twice, in one optimizer step each: 100 steps, a tenth of which warm up.
    assert (found["update"]["num_epochs"], found["update"]["num_minibatches"]) == (2, 1)
    optim = found["update"]["optim"]
    assert (optim["warmup_steps"], optim["schedule"], optim["beta2"]) == (10, "cosine", 0.999)
    assert (found["learning_rate"], found["kl"]["coefficient"]) == (1e-5, 0.04)
    assert found["algorithm"] == "dapo"  # TRL's default
    assert found["update"]["objective"] == {
        "scale": "group_sample", "clip_low": 0.2, "clip_high": 0.28, "weighting": "token_mean",
    }  # fmt: skip
    assert found["rewards"] == [{"kind": "math"}, {"kind": "my_rewards:brief", "weight": 0.2}]
    assert preset["tracking"] == {"also": ["wandb"]}
    text = (project / "grpo.toml").read_text()
    assert "without effect on the weights: logging_steps, output_dir\n" in text
    assert "group_size = 4  # num_generations" in text


def test_sft_takes_the_steps_of_all_passes_and_their_warm_up(project: Path) -> None:
    preset = converted(project, "sft", COMMON + "warmup_ratio: 0.1\n")
    # 100 rows are 13 micro-batches of 8, so 7 steps of two; three passes are TRL's default. A tenth of 21 is 3 steps.
    found = preset["stages"]["sft"]
    assert (found["num_steps"], found["batch_size"], found["optim"]["warmup_steps"]) == (21, 16, 3)
    assert preset["data"]["demonstrations"]["max_tokens"] == 64
    assert "assistant_only_loss = false by default: ours trains on" in (project / "sft.toml").read_text()


def test_dpo_makes_whole_passes_with_trls_defaults(project: Path) -> None:
    found = converted(project, "dpo", COMMON + "label_smoothing: 0.1\nuse_peft: true\nlora_r: 4\nlora_dropout: 0\n")
    stage = found["stages"]["dpo"]
    assert (stage["num_epochs"], stage["batch_size"], stage["beta"], stage["label_smoothing"]) == (3, 16, 0.1, 0.1)
    assert stage["lora"] == {"rank": 4, "alpha": 32}
    assert found["seed"] == 42


def test_the_steps_of_a_reward_model_limit_its_pairs(project: Path) -> None:
    found = converted(project, "reward", COMMON.replace("learning_rate: 1e-5\n", "") + "max_steps: 5\n")
    stage = found["stages"]["reward_model"]
    assert (stage["num_epochs"], stage["batch_size"], found["data"]["pairs"]["num_train"]) == (1, 16, 80)  # 5 x 16
    assert (stage["learning_rate"], stage["head_learning_rate"]) == (1e-4, 1e-4)  # TRL's default for both


def test_what_would_change_the_training_is_refused_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        "top_p: 0.9": "top_p = 0.9",
        "repetition_penalty: 1.1": "repetition_penalty = 1.1",
        "loss_type: vespo": "loss_type = 'vespo'",
        "lr_scheduler_type: polynomial": "lr_scheduler_type = 'polynomial'",
        "sync_ref_model: true": "sync_ref_model = True",
        "label_smoothing: 0.1": "label_smoothing: a key of TRL's dpo, not of grpo",
        "frobnicate: 1": "frobnicate: unknown",
        "num_generations: 5": "a batch of 16 completions",
    }
    config = "\n".join([GRPO.replace("num_generations: 4\n", "").replace("lr_scheduler_type: cosine\n", ""), *refused])
    write_rows(project / "data", {"train": [prompt("train", i) for i in range(9)]})
    (project / "grpo.yaml").write_text(config)
    assert main(["from-trl", "grpo.yaml", "--trainer", "grpo"]) == 2 and not (project / "grpo.toml").exists()
    said = capsys.readouterr().err
    assert [text for text in refused.values() if text not in said] == []


OTHERS = {
    "verl": """data: {train_files: train.parquet, max_prompt_length: 512, train_batch_size: 8}
actor_rollout_ref: {model: {path: model}, actor: {optim: {lr: 1e-6}}, rollout: {n: 4}}
algorithm: {adv_estimator: grpo}
trainer: {total_epochs: 1}
""",
    "OpenRLHF": """pretrain: model
prompt_data: data
input_key: problem
n_samples_per_prompt: 4
actor_learning_rate: 1e-6
init_kl_coef: 0.01
bf16: true
""",
}


@pytest.mark.parametrize("library", OTHERS)
@pytest.mark.parametrize("trainer", [(), ("--trainer", "grpo")])
def test_the_file_of_another_library_is_refused_as_such(
    project: Path, capsys: pytest.CaptureFixture[str], library: str, trainer: tuple[str, ...]
) -> None:
    Path("other.yaml").write_text(OTHERS[library])
    assert main(["from-trl", "other.yaml", *trainer]) == 2
    said = capsys.readouterr().err
    assert "from-trl reads configurations of TRL alone" in said
    assert " keys are none of TRL's: " in said and OTHERS[library].partition(":")[0] in said
    assert not Path("other.toml").exists()


def test_the_prompts_limit_of_earlier_dpo_trainers_is_named_as_a_difference(project: Path) -> None:
    found = converted(project, "dpo", COMMON + "max_length: 96\nmax_prompt_length: 48\n")
    assert found["data"]["pairs"]["max_tokens"] == 96
    assert "# - max_prompt_length: not used: ours cuts answers to max_length" in Path("dpo.toml").read_text()


def test_the_trainer_is_found_by_its_keys_or_asked_for(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(project / "data", {"train": [prompt("train", i) for i in range(99)]})
    (project / "mine.yaml").write_text(COMMON + "packing: false\n")
    assert main(["from-trl", "mine.yaml"]) == 0
    assert 'kind = "sft"' in (project / "mine.toml").read_text()
    assert main(["from-trl", "mine.yaml"]) == 2  # mine.toml stays
    for config, fitting in ((COMMON, "dpo, sft, reward"), (COMMON + "packing: false\nbeta: 1\n", "none")):
        (project / "other.yaml").write_text(config)
        capsys.readouterr()
        assert main(["from-trl", "other.yaml"]) == 2
        said = capsys.readouterr().err
        assert f"the keys fit {fitting} of TRL's trainers" in said
        assert ("sft has no beta; " in said) == (fitting == "none")


def test_rows_as_trl_has_them_get_the_adapter_that_reads_them(project: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "chosen": f" {i + 1}", "rejected": " no"} for i in range(100)]
    write_rows(project / "data", {"train": rows})
    (project / "mine.yaml").write_text(COMMON)
    assert main(["from-trl", "mine.yaml", "--trainer", "dpo"]) == 0
    assert tomllib.loads((project / "mine.toml").read_text())["data"]["pairs"]["adapter"] == "trl_preference"
    assert main(["plan", "mine.toml"]) == 0


def test_config_names_the_key_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "tiny", "stages.grpo.num_generations"]) == 2
    assert "did you mean stages.grpo.group_size? It is TRL's num_generations" in capsys.readouterr().err
