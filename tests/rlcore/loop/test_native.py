"""Checks of the library before a run, with the words of `rlcore plan`, and the forms of input that it accepts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import ConfigError
from rlcore.loop import Components, HeldOut, train
from rlcore.loop.native import chat_prompts, native_components
from rlcore.models.importing import import_model
from rlcore.rewards.user_function import function_reward
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout
from tests import strategies
from tests.rlcore.loop.conftest import QUESTIONS, SHAPE, Tape, right_answers


def components(
    start: Path | str, folder: Path | str, *, prompts: Any = None, reward: Any = None, **settings: Any
) -> Components:
    if prompts is None:
        prompts = chat_prompts(ChatTokenizer.load(start), QUESTIONS)
    rl = strategies.rl_config(**settings)
    return native_components(start, rl, prompts=prompts, reward=reward or right_answers, folder=folder)


def sampling(**settings: Any) -> rlcore.SamplingConfig:
    return rlcore.SamplingConfig(**{"max_new_tokens": 6} | settings)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"sampling": sampling(temperature=0.0)}, "sampling.temperature = 0.0: must be greater than 0.0"),
    "rate": ({"learning_rate": -1e-3}, "learning_rate = -0.001: must be greater than 0.0"),
    "kind": ({"num_iterations": 2.5}, "num_iterations = 2.5: must be an integer, not a float"),
    "group": ({"group_size": 1}, "group_size = 1: grpo compares answers to one prompt, so one carries no signal"),
    "algorithm": ({"algorithm": "ggrpo"}, "algorithm: unknown algorithm 'ggrpo'"),
    "length": ({"sampling": sampling(max_new_tokens=500)}, "max_new_tokens is 500: 5"),
    "positions": ({"sampling": sampling(max_new_tokens=500)}, "the model reads 128"),
    "no prompts": ({"prompts": []}, "prompts: there are none; make some with rlcore.chat_prompts"),
    "texts": ({"prompts": ["3 + 4"]}, "prompts: '3 + 4' is str, not rlcore.Prompt; make prompts with"),
    "lora": (
        {"update": rlcore.UpdateConfig(lora=rlcore.config.LoraConfig(rank=4))},
        "native_components supports neither LoRA",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_by_its_name_before_anything_is_computed(name: str, start: Path, tmp_path: Path) -> None:
    settings, expected = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        components(start, tmp_path / "run", **settings)


def test_all_values_out_of_bounds_are_named_at_once(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        components(start, tmp_path / "run", learning_rate=-1.0, group_size=0, sampling=sampling(temperature=-1.0))
    keys = ("group_size = 0", "learning_rate = -1.0", "sampling.temperature = -1.0")
    assert "has 3 errors" in str(caught.value) and all(key in str(caught.value) for key in keys)


def test_a_plain_function_rewards_as_the_wrapped_one_does(start: Path, tmp_path: Path) -> None:
    def length(rollouts: Sequence[Rollout]) -> list[float]:
        return [float(len(rollout.completion_ids)) for rollout in rollouts]

    plain, wrapped = (
        train(components(start, tmp_path / name, reward=reward, num_iterations=1), Tape()).history[0]["reward/mean"]
        for name, reward in (("plain", length), ("wrapped", function_reward(length)))
    )
    assert plain == wrapped > 0.0


def test_a_verifier_that_is_no_reward_is_refused_with_the_way_to_wrap_it(start: Path, tmp_path: Path) -> None:
    made = components(start, tmp_path / "run")
    unwrapped: Any = right_answers
    held_out = HeldOut(prompts=made.prompts[:1], verifier=unwrapped)
    made = dataclasses.replace(made, prompts=made.prompts[1:])
    with pytest.raises(ConfigError, match=r"is a function, not the result of function_reward") as caught:
        train(dataclasses.replace(made, held_out=held_out), Tape())
    assert "rlcore.function_reward(function)" in str(caught.value)


def test_texts_serve_as_paths(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(rlcore.ModelConfig(source="scratch", shape=SHAPE), "model", seed=0)
    made = components("model", "run", num_iterations=1)
    train(made, Tape())
    made.learner.save_model("model", "trained")
    assert ChatTokenizer.load("trained").eos_ids == ChatTokenizer.load(start).eos_ids
    policy = rlcore.load_policy("trained", device=torch.device("cpu"), dtype=torch.float32)
    rlcore.save_model(policy, "trained", "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == Path("trained/model.safetensors").read_bytes()
