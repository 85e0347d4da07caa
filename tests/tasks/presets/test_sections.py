from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.presets.sections import Sections, sections_of, stage_sections

VLLM = "engine.kind=vllm"


def changed(*overrides: str, start: tuple[str, ...] = (), preset: str = "tiny") -> set[str]:
    """Stages whose section is another one with the overrides."""
    before, after = (
        {stage.name: stage.sections(config).for_key() for stage in stages(config)}
        for config in (open_preset(preset, start), open_preset(preset, (*start, *overrides)))
    )
    return {name for name in before if before[name] != after[name]}


def test_the_runs_engine_is_in_the_key_of_everything_that_is_sampled_and_of_nothing_else() -> None:
    evaluations = {f"evaluate_{name}" for name in ("base", "sft", "grpo", "ppo")}
    assert changed(VLLM) == {"grpo", "ppo", *evaluations}
    sampled = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
    assert changed(VLLM, start=sampled) == {"prepare_preferences", "grpo", "ppo", *evaluations}
    reasoning = changed(VLLM, preset="reasoning")
    assert {"rejection", "grpo_mixed"} <= reasoning
    assert not {"import_sft", "sft", "sft_kept", "compare"} & reasoning


def test_an_engine_of_an_evaluations_own_changes_no_training() -> None:
    assert {name.partition("_")[0] for name in changed("evaluation.engine.kind=vllm")} == {"evaluate"}
    assert changed("stages.grpo.sampling.engine.kind=vllm") == {"grpo"}
    assert changed(VLLM, start=("evaluation.engine.kind=native",)) == {"grpo", "ppo"}


@pytest.mark.parametrize(
    "override", ["engine.dtype=float16", "engine.gpus.tensor_parallel=2", "engine.enforce_eager=false"]
)
def test_what_changes_the_numbers_is_in_the_key(override: str) -> None:
    assert "evaluate_sft" in changed(override, start=(VLLM,))
    assert changed(override) == set()  # the native engine has no such thing


@pytest.mark.parametrize(
    "override",
    [
        "engine.python=/opt/engine/bin/python",
        "engine.replicas=4",
        "engine.gpus.devices=[3]",
        "engine.weight_transfer=gloo",
        "engine.weight_dir=/data",
        "engine.gpus.gpu_memory_utilization=0.5",
        "engine.kv_cache_gib=2.0",
        "engine.timeouts.startup_seconds=60.0",
    ],
)
def test_where_an_engine_runs_is_in_no_key(override: str) -> None:
    assert changed(override, start=(VLLM,)) == set()


def test_a_key_holds_plain_values() -> None:
    config = open_preset("reasoning", (VLLM,))
    section = {stage.name: stage.sections(config).for_key() for stage in stages(config)}["rejection"]
    assert section["stage"]["sampling"]["engine"]["kind"] == "vllm"
    assert section["stage"]["num_samples"] == config.stages["rejection"].settings.num_samples


def test_a_section_that_samples_comes_with_its_engine_and_an_evaluation_without() -> None:
    config = open_preset("tiny", (VLLM, "stages.ppo.sampling.engine.kind=native"))
    grpo, ppo = (stage_sections(config, name).stage.settings.sampling.engine.kind for name in ("grpo", "ppo"))
    assert (grpo, ppo) == ("vllm", "native")
    found = sections_of(config, "evaluation", "confidence")
    assert (found.evaluation.engine, found.confidence) == (None, 0.95)


def test_what_was_not_declared_is_no_attribute() -> None:
    found = stage_sections(open_preset("tiny"), "sft")
    assert found.stage.settings.num_steps == 480
    with pytest.raises(AttributeError, match="'hardware', so its key does not count it"):
        _ = found.hardware
    assert copy.copy(found) == found


def test_a_data_set_without_a_system_prompt_has_the_model_s() -> None:
    config = open_preset("tiny", ["model.system_prompt=Be brief.", "data.prompts.system_prompt=Own."])
    found = {stage.name: stage.sections(config) for stage in stages(config)}
    assert found["prepare_prompts"].data["prompts"].system_prompt == "Own."
    assert found["prepare_demonstrations"].data["demonstrations"].system_prompt == "Be brief."
    assert {"prepare_demonstrations", "prepare_preferences"} <= changed("model.system_prompt=Be brief.")


def test_where_a_file_lies_is_in_no_key_and_its_name_is() -> None:
    start = ("data.prompts.adapter=gsm8k", "data.prompts.path=a/rows.jsonl", "data.prompts.eval_path=a/test.jsonl")
    elsewhere = ("data.prompts.path=/b/rows.jsonl", "data.prompts.eval_path=c/test.jsonl")
    assert changed(*elsewhere, start=start) == set()
    assert "prepare_prompts" in changed("data.prompts.path=a/other.jsonl", start=start)
    model = ("model.source=folder", "model.path=weights/qwen", "model.chat_template=a.jinja")
    assert changed("model.path=/data/weights/qwen", "model.chat_template=b/a.jinja", start=model) == set()
    assert "import_sft" in changed("model.source=hub", start=model)


def test_the_files_that_sections_name_are_known_with_their_folders_and_counted_without() -> None:
    data = dataclasses.replace(open_preset("tiny").data["prompts"], adapter="prompts", path="rows.jsonl")
    sections = Sections({"data": {"prompts": data, "pairs": dataclasses.replace(data, path="hub:a/b@0")}})
    assert sections.files() == {"data.prompts.path": str(Path("rows.jsonl").absolute())}
    played = open_preset("towns_agent", ["stages.grpo.sampling.agent.sandbox_read=['/data']"])
    at, named = "stage.sampling.agent", played.stages["grpo"].settings.sampling.agent.files
    assert stage_sections(played, "grpo").files() == {
        **{f"{at}.files.{number}": str(Path(file).absolute()) for number, file in enumerate(named)},
        f"{at}.sandbox_read.0": "/data",
    }
    elsewhere = Sections({"data": {"prompts": dataclasses.replace(data, path="/elsewhere/rows.jsonl")}})
    assert elsewhere.for_key()["data"]["prompts"] == sections.for_key()["data"]["prompts"]
