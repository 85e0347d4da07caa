"""Faults around a run: resume, saving, evaluation and custom code."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.lab import Diary, Patches, Play, Verdict, components_of, played, resumed, stopped_by
from benchmarks.faults.models import CPU, new_folder, start
from rlcore.checks.audit.integrity import verify_model, write_model_digest
from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.config import CheckpointConfig
from rlcore.hardware.runtime import Runtime
from rlcore.loop import Components, train
from rlcore.loop.run import Run
from rlcore.models.loading import load_policy, save_model
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward
from rlcore.sampling.native import NativeSampler
from rlcore.training import checkpoint
from rlcore.training import local_learner as local_module
from rlcore.types import Rollout

RUNTIME = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)

# Resume


def after_resume(
    scene: str, inject: Callable[[Patches], None], change: Callable[[Components], Components] | None = None
) -> Play:
    """Kill a run, inject the fault, and resume."""

    def play(patch: Patches) -> Verdict:
        (folder,) = resumed(scene)
        inject(patch)
        often = {"checkpoints": CheckpointConfig(every_iterations=1)}
        make = components_of(scene, folder=folder, **often)
        return played(lambda: change(make) if change else make)

    return play


def lost(*names: str) -> Callable[[Patches], None]:
    """Make functions of the checkpoint do nothing."""

    def inject(patch: Patches) -> None:
        for name in names:
            patch.set(checkpoint, name, lambda *given, **more: None)

    return inject


def scalars_lost(name: str, value: Any) -> Callable[[Patches], None]:
    """Change a number of the checkpoint."""

    def inject(patch: Patches) -> None:
        old = checkpoint._restore
        patch.set(checkpoint, "_restore", lambda folder, learner, found: old(folder, learner, {**found, name: value}))

    return inject


def position_lost(patch: Patches) -> None:
    """Resume as if one iteration more were done."""
    old = Run.restore
    patch.set(Run, "restore", lambda self, state: old(self, {**state, "iteration": 1}))


def reanchored(components: Components) -> Components:
    """Replace the reference policy by the interrupted policy."""
    learner: Any = components.learner
    load = learner.load

    def restore(*given: Any, **more: Any) -> Any:
        found = load(*given, **more)
        learner.reference.load_state_dict(learner.learner.policy.state_dict())
        return found

    learner.load = restore
    return components


def other_prompts(components: Components) -> Components:
    """Change the reference answers of the prompts between two starts."""
    changed = [dataclasses.replace(prompt, reference=prompt.reference + "0") for prompt in components.prompts]
    return dataclasses.replace(components, prompts=changed)


# Saving and evaluation


def trained() -> Components:
    """Train the components of a run of two iterations."""
    components = components_of("grpo", num_iterations=2)
    train(components, Diary())
    return components


def saving(inject: Callable[[Patches, Components], None]) -> Play:
    """Train, inject the fault, and save."""

    def play(patch: Patches) -> Verdict:
        components = trained()
        inject(patch, components)
        return stopped_by(lambda: components.learner.save_model(start(), new_folder()))

    return play


def saves_the_start(patch: Patches, components: Components) -> None:
    """Write the starting model instead of the trained one."""
    first = load_policy(start(), **CPU)
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(first, *rest, **more))


def saves_half(patch: Patches, components: Components) -> None:
    """Write one trained layer, and the rest of the start."""
    mixed = load_policy(start(), **CPU)
    state = {n: v for n, v in components.learner.weights().items() if "layers.0" in n}
    mixed.load_state_dict(state, strict=False)
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(mixed, *rest, **more))


def saves_rounded(patch: Patches, components: Components) -> None:
    """Round the written weights to six bits after the point."""
    learned = components.learner.learner.policy  # type: ignore[attr-defined]
    rounded = load_policy(start(), **CPU)
    rounded.load_state_dict({n: (64.0 * v).round() / 64.0 for n, v in learned.state_dict().items()})
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(rounded, *rest, **more))


def evaluation(change: Callable[[Path, Path], None], *, stage: str = "grpo", engine: bool = False) -> Play:
    """Seal a trained model, change it, and load it for an evaluation."""

    def play(patch: Patches) -> Verdict:
        components, folder = trained(), new_folder()
        folder.mkdir()
        components.learner.save_model(start(), folder / "model")
        write_model_digest(folder, stage="grpo", model=folder / "model")
        change(folder, start())

        def take_up() -> None:
            tokenizer = verify_model(folder, stage=stage, model=folder / "model")
            served = start() if engine else folder / "model"
            sampler = NativeSampler(load_policy(served, **CPU), tokenizer)
            verify_served_weights(sampler, folder / "model", components.prompts[:2], RUNTIME, seed=0)

        return stopped_by(take_up)

    return play


def template_changed(folder: Path, _: Path) -> None:
    """Change the beginning of each prompt in the folder's template."""
    path = folder / "model/chat_template.jinja"
    path.write_text("Be brief. " + path.read_text(encoding="utf-8"), encoding="utf-8")


def weights_exchanged(folder: Path, first: Path) -> None:
    """Put the starting weights into the folder of the trained model."""
    (folder / "model/model.safetensors").write_bytes((first / "model.safetensors").read_bytes())


# Foreign code


def own_reward(function: Callable[..., Any], *, minutes: float = 60.0) -> Play:
    """Run with a function as the reward."""

    def play(patch: Patches) -> Verdict:
        reward = WeightedReward([WeightedTerm(FunctionReward(function, "own", timeout_minutes=minutes), 1.0)])
        return played(lambda: dataclasses.replace(components_of("grpo", num_iterations=20), reward=reward))

    return play


def brief(rollouts: Sequence[Rollout]) -> list[Any]:
    """Reward short completions."""
    return [-float(len(rollout.completion_ids)) for rollout in rollouts]


def hangs(rollouts: Sequence[Rollout]) -> list[Any]:
    """Hang from the third iteration on."""
    if rollouts[0].policy_version >= 2:
        threading.Event().wait(600.0)
    return brief(rollouts)


def other_order(rollouts: Sequence[Rollout]) -> list[Any]:
    """Return the values of other rollouts from the third iteration on."""
    values = brief(rollouts)
    return [*values[1:], values[0]] if rollouts[0].policy_version >= 2 else values


def at_random(rollouts: Sequence[Rollout]) -> list[Any]:
    """Return random values."""
    return [random.random() for _ in rollouts]


def not_finite(rollouts: Sequence[Rollout]) -> list[Any]:
    """Return infinity from the third iteration on."""
    return [float("inf") if rollout.policy_version >= 2 else 1.0 for rollout in rollouts]


def raises_later(rollouts: Sequence[Rollout]) -> list[Any]:
    """Divide by zero in the third iteration."""
    return [1.0 / (2 - rollout.policy_version) for rollout in rollouts]


def scores_few(rollouts: Sequence[Rollout]) -> list[Any]:
    """Return no score for every fourth rollout."""
    return [None if place % 4 == 0 else 1.0 for place, _ in enumerate(rollouts)]


AROUND: dict[str, Play] = {
    "resume: weights are not restored": after_resume("grpo", lost("_restore_weights")),
    "resume: the optimizer is not restored": after_resume("grpo", lost("_restore_optimizer")),
    "resume: nothing is restored": after_resume("ppo", lost("_restore_weights", "_restore_optimizer")),
    "resume: the iteration is another": after_resume("grpo", position_lost),
    "resume: the policy's version is another": after_resume("grpo", scalars_lost("policy_version", 1)),
    "resume: the KL's coefficient is another": after_resume(
        "grpo, KL in the loss", scalars_lost("kl_coefficient", 0.9)
    ),
    "resume: the reference is the interrupted policy": after_resume(
        "grpo, KL in the loss", lambda patch: None, reanchored
    ),
    "resume: the prompts' references are others": after_resume("grpo", lambda patch: None, other_prompts),
    "the start is saved in place of what was trained": saving(saves_the_start),
    "half of what was trained is saved": saving(saves_half),
    "weights are rounded when they are saved": saving(saves_rounded),
    "another stage's model is evaluated": evaluation(lambda *_: None, stage="ppo"),
    "the evaluation's engine serves the start": evaluation(lambda *_: None, engine=True),
    "the evaluated weights were exchanged on disk": evaluation(weights_exchanged),
    "the evaluation has another chat template": evaluation(template_changed),
    "a user's reward hangs": own_reward(hangs, minutes=0.02),
    "a user's reward gives its values in another order, later": own_reward(other_order),
    "a user's reward is random": own_reward(at_random),
    "a user's reward becomes infinite": own_reward(not_finite),
    "a user's reward raises later": own_reward(raises_later),
    "a user's reward cannot score a quarter": own_reward(scores_few),
}
