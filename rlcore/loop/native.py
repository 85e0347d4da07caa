"""Components of a run in one process with the built-in engine, from a checkpoint folder, prompts and a reward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlcore.checks.settings import check_run
from rlcore.components import Components
from rlcore.config import HardwareConfig, RlConfig, to_dict
from rlcore.config.rl import OBSERVERS
from rlcore.distributed.build import LearnerPlan, make_learner, make_policy
from rlcore.errors import ConfigError
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.models.model_validation import read_config
from rlcore.models.runtime import Runtime
from rlcore.models.saving import weights_digest
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.user_function import UserFunction, function_reward
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt


def native_components(
    start: Path | str,
    config: RlConfig,
    *,
    prompts: Sequence[Prompt],
    reward: WeightedReward | UserFunction,
    folder: Path | str,
    seed: int = 0,
) -> Components:
    """Build the components of a run from the checkpoint ``start``, on a GPU if there is one.

    ``reward``: a function of rollouts, or the result of ``build_rewards``. ``folder``: for the run's checkpoints. To
    add held-out problems or other health rules, use ``dataclasses.replace(components, held_out=..., health=...)``.

    Raises:
        ConfigError: Settings that a preset may not have either, or that the built-in engine does not support.
        ModelError: ``start`` is not a trainable checkpoint.
    """
    start, folder = Path(start), Path(folder)
    _require_supported(config)
    check_run(config, prompts, read_config(start, local_files_only=True), source="native_components")
    reward = reward if isinstance(reward, WeightedReward) else function_reward(reward)
    tokenizer = ChatTokenizer.load(start)
    device, dtype = choose_device_and_dtype(HardwareConfig())
    runtime = Runtime(device=device, compute_dtype=dtype)
    plan = LearnerPlan(start=start, critic_start=start, config=config, seed=seed)
    learner = make_learner(plan, make_policy(plan, runtime), runtime)
    of_engine = runtime.of_native_engine(config.update.lora)
    engine = NativeSampler(of_engine.load_frozen(start), tokenizer, max_concurrent=config.sampling.max_concurrent)
    return Components(
        seed=seed,
        learner=learner,
        engine=engine,
        sampler=engine,
        engine_dtype=of_engine.compute_dtype,
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        folder=folder,
        identity=_identity(start, config, prompts, seed=seed),
    )


def chat_prompts(tokenizer: ChatTokenizer, questions: Mapping[str, str]) -> list[Prompt]:
    """Return a prompt per question, in the model's chat template. The value is its reference answer, or ``""``.

    Raises:
        ModelError: The template rejects a question.
    """
    conversations = {question: (Message(role="user", content=question),) for question in questions}
    return [
        Prompt(
            prompt_id=question,
            messages=messages,
            token_ids=tokenizer.render_prompt(messages),
            reference=questions[question],
            task="chat",
        )
        for question, messages in conversations.items()
    ]


def _require_supported(config: RlConfig) -> None:
    engine, critic = config.sampling.engine, config.critic
    settings = {
        "update.lora.rank": config.update.lora.rank > 0,
        "sampling.episodes.tools": config.sampling.episodes.has_tools,
        "sampling.agent": config.sampling.agent is not None,
        "sampling.engine.kind": engine is not None and engine.kind != "native",
        "critic.init_from": critic.init_from != "policy",
    }
    for name in (name for name, is_set in settings.items() if is_set):
        raise ConfigError(
            "native_components supports neither LoRA, tools, agents, other engines nor a critic from a reward model",
            where=name,
            fix="leave it out, or build rlcore.Components yourself, like native_components",
        )


def _identity(start: Path, config: RlConfig, prompts: Sequence[Prompt], *, seed: int) -> dict[str, str]:
    """Return the inputs that checkpoints must match: all that weights depend on, with a line per setting.

    Without the reward, which has no digest, and the number of iterations, unless earlier ones depend on it.
    """
    free = OBSERVERS if config.bound_to_length else (*OBSERVERS, "num_iterations")
    settings = {name: value for name, value in to_dict(config).items() if name not in free}
    rows = json.dumps([[each.prompt_id, each.token_ids, each.reference, each.columns] for each in prompts])
    return {
        "seed": str(seed),
        "starting checkpoint": weights_digest(start)[:12],
        "prompts": f"{len(prompts)} with digest {hashlib.sha256(rows.encode()).hexdigest()[:12]}",
        **dict(_lines(settings)),
    }


def _lines(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
