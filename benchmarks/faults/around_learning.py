"""Faults around a run: resume, saving, evaluation, foreign code, and the supervised stages before it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import lab
from benchmarks.faults.lab import Diary, Patches, Verdict, new_folder, parts_of, played, resumed, scratch, start
from rlcore.audit.data import (
    label_noise,
    pairing_of,
    require_demonstrations,
    require_labels,
    require_last_token,
    require_pairing,
)
from rlcore.audit.seals import require_saved, require_sealed, require_served, write_seal
from rlcore.config import CheckpointConfig, KlConfig, RewardModelConfig
from rlcore.demonstrations import Demonstration, render_conversation
from rlcore.errors import RlcoreError
from rlcore.loop import Parts, train
from rlcore.loop.run import Run
from rlcore.models.heads import ScalarModel
from rlcore.models.loading import load_policy, save_model
from rlcore.rewards.mix import MixedReward, WeightedPart
from rlcore.rewards.user_function import FunctionReward
from rlcore.sampling.native import NativeSampler
from rlcore.tokenization import ChatTokenizer
from rlcore.training import checkpoint
from rlcore.training import local as local_module
from rlcore.training.checkpoint import LossScale
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_fit import Fitted, fit_reward_model
from rlcore.training.sft import train_sft
from rlcore.types import Message, Rollout

Play = Callable[[Patches], Verdict]
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
_ = LossScale


def stopped_by(work: Callable[[], object], steps: int = 0) -> Verdict:
    """The verdict on work that has no iterations."""
    try:
        work()
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=steps, message=error.what)
    return Verdict(caught="silent", steps=steps, message="")


# Resume


def after_resume(scene: str, inject: Callable[[Patches], None], change: Callable[[Parts], Parts] | None = None) -> Play:
    """Kill a run, put the fault in, and go on."""

    def play(patch: Patches) -> Verdict:
        (folder,) = resumed(scene)
        inject(patch)
        often = {"checkpoints": CheckpointConfig(iterations=1)}
        make = parts_of(scene, folder=folder, **often)
        return played(lambda: change(make) if change else make)

    return play


def lost(*names: str) -> Callable[[Patches], None]:
    """Functions of the checkpoint that do nothing."""

    def inject(patch: Patches) -> None:
        for name in names:
            patch.set(checkpoint, name, lambda *given, **more: None)

    return inject


def scalars_lost(name: str, value: Any) -> Callable[[Patches], None]:
    def inject(patch: Patches) -> None:
        old = checkpoint._restore
        patch.set(checkpoint, "_restore", lambda folder, learner, found: old(folder, learner, {**found, name: value}))

    return inject


def position_lost(patch: Patches) -> None:
    old = Run.restore
    patch.set(Run, "restore", lambda self, state: old(self, {**state, "iteration": 1}))


def reanchored(parts: Parts) -> Parts:
    """The reference is what the policy was when the run was interrupted."""
    learner: Any = parts.learner
    load = learner.load

    def restore(*given: Any, **more: Any) -> Any:
        found = load(*given, **more)
        learner.reference.load_state_dict(learner.learner.policy.state_dict())
        return found

    learner.load = restore
    return parts


def other_prompts(parts: Parts) -> Parts:
    changed = [dataclasses.replace(prompt, reference=prompt.reference + "0") for prompt in parts.prompts]
    return dataclasses.replace(parts, prompts=changed)


# Saving and evaluation


def trained() -> Parts:
    parts = parts_of("grpo", num_iterations=2)
    train(parts, Diary())
    return parts


def saving(inject: Callable[[Patches, Parts], None]) -> Play:
    """Train a little, put the fault in, and save."""

    def play(patch: Patches) -> Verdict:
        parts = trained()
        inject(patch, parts)
        return stopped_by(lambda: parts.learner.save_model(start(), new_folder()))

    return play


def saves_the_start(patch: Patches, parts: Parts) -> None:
    first = load_policy(start(), **CPU)
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(first, *rest, **more))


def saves_half(patch: Patches, parts: Parts) -> None:
    mixed = load_policy(start(), **CPU)
    state = {n: v for n, v in parts.learner.weights().items() if "layers.0" in n}
    mixed.load_state_dict(state, strict=False)
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(mixed, *rest, **more))


def saves_rounded(patch: Patches, parts: Parts) -> None:
    learned = parts.learner.learner.policy  # type: ignore[attr-defined]
    rounded = load_policy(start(), **CPU)
    rounded.load_state_dict({n: (64.0 * v).round() / 64.0 for n, v in learned.state_dict().items()})
    patch.set(local_module, "save_model", lambda policy, *rest, **more: save_model(rounded, *rest, **more))


def evaluation(change: Callable[[Path, Path], None], *, stage: str = "grpo", engine: bool = False) -> Play:
    """Seal a trained model, change something, and take it up as an evaluation does."""

    def play(patch: Patches) -> Verdict:
        parts, folder = trained(), new_folder()
        folder.mkdir()
        parts.learner.save_model(start(), folder / "model")
        write_seal(folder, stage="grpo", model=folder / "model")
        change(folder, start())

        def take_up() -> None:
            tokenizer = require_sealed(folder, stage=stage, model=folder / "model")
            served = start() if engine else folder / "model"
            require_served(NativeSampler(load_policy(served, **CPU), tokenizer), folder / "model")

        return stopped_by(take_up)

    return play


def template_changed(folder: Path, _: Path) -> None:
    path = folder / "model/chat_template.jinja"
    path.write_text("Be brief. " + path.read_text(encoding="utf-8"), encoding="utf-8")


def weights_exchanged(folder: Path, first: Path) -> None:
    (folder / "model/model.safetensors").write_bytes((first / "model.safetensors").read_bytes())


# Foreign code


def own_reward(function: Callable[..., Any], *, minutes: float = 60.0) -> Play:
    """A run with a function as its reward."""

    def play(patch: Patches) -> Verdict:
        reward = MixedReward([WeightedPart(FunctionReward(function, "own", deadline_minutes=minutes), 1.0)])
        return played(lambda: dataclasses.replace(parts_of("grpo", num_iterations=20), reward=reward))

    return play


def brief(rollouts: Sequence[Rollout]) -> list[Any]:
    return [-float(len(rollout.completion_ids)) for rollout in rollouts]


def hangs(rollouts: Sequence[Rollout]) -> list[Any]:
    if rollouts[0].policy_version >= 2:
        threading.Event().wait(600.0)
    return brief(rollouts)


def other_order(rollouts: Sequence[Rollout]) -> list[Any]:
    values = brief(rollouts)
    return [*values[1:], values[0]] if rollouts[0].policy_version >= 2 else values


def at_random(rollouts: Sequence[Rollout]) -> list[Any]:
    return [random.random() for _ in rollouts]


def by_batch(rollouts: Sequence[Rollout]) -> list[Any]:
    most = max(len(rollout.completion_ids) for rollout in rollouts)
    return [len(rollout.completion_ids) / most for rollout in rollouts]


def not_finite(rollouts: Sequence[Rollout]) -> list[Any]:
    return [float("inf") if rollout.policy_version >= 2 else 1.0 for rollout in rollouts]


def raises_later(rollouts: Sequence[Rollout]) -> list[Any]:
    return [1.0 / (2 - rollout.policy_version) for rollout in rollouts]


def scores_few(rollouts: Sequence[Rollout]) -> list[Any]:
    return [None if place % 4 == 0 else 1.0 for place, _ in enumerate(rollouts)]


# Supervised stages


def sft(change: Callable[[list[Demonstration]], list[Demonstration]], *, rows: bool = False) -> Play:
    """Train on demonstrations; ``rows``: the fault is in the rows that they are made of."""

    def play(patch: Patches) -> Verdict:
        tokenizer, model = ChatTokenizer.load(scratch()), load_policy(scratch(), **CPU)
        given = lab.rows_of("train")
        if rows:
            answers = [answer for _, answer in given]
            given = [
                (messages, answer) for (messages, _), answer in zip(given, [*answers[7:], *answers[:7]], strict=True)
            ]
        made = [render_conversation(tokenizer, messages, answer) for messages, answer in given]
        made = made if rows else change(made)

        def work() -> None:
            require_demonstrations(given, made, tokenizer)
            train_sft(model, made, made[::2], lab.SFT, seed=0, report=lambda *_: None)
            found = pairing_of(model, made[::2], tokens_per_microbatch=4096, seed=0)
            require_pairing(found, sigmas=3.0, num_seen=lab.SFT.num_steps * lab.SFT.batch_size)

        return stopped_by(work)

    return play


def without_end(them: list[Demonstration]) -> list[Demonstration]:
    return [
        Demonstration(
            sequence=dataclasses.replace(one.sequence, completion_ids=one.sequence.completion_ids[:-1]),
            loss_mask=one.loss_mask[:-1],
        )
        for one in them
    ]


def mask_to_the_left(them: list[Demonstration]) -> list[Demonstration]:
    return [dataclasses.replace(one, loss_mask=(*one.loss_mask[1:], False)) for one in them]


def rotated(them: list[Demonstration]) -> list[Demonstration]:
    return [
        Demonstration(
            sequence=dataclasses.replace(one.sequence, completion_ids=them[place - 7].sequence.completion_ids),
            loss_mask=them[place - 7].loss_mask,
        )
        for place, one in enumerate(them)
    ]


def pairs(swapped: float) -> list[TokenPair]:
    """Right answers against wrong ones of the same length, a share of them the wrong way round."""
    tokenizer, draws, found = ChatTokenizer.load(start()), random.Random(1), []
    for number, (question, total) in enumerate(lab.SUMS.items()):
        asked = [Message(role="user", content=question)]
        sides = [f"{question}={total}", f"{total}={question}"]
        if draws.random() < swapped:
            sides.reverse()
        prompt_ids, chosen = tokenizer.render_demonstration(asked, sides[0])
        _, rejected = tokenizer.render_demonstration(asked, sides[1])
        found.append(TokenPair(set_id=str(number), prompt_ids=prompt_ids, chosen_ids=chosen, rejected_ids=rejected))
    return found


def fitted(them: list[TokenPair]) -> Fitted:
    config = RewardModelConfig(num_epochs=1, batch_size=16, learning_rate=1e-3, head_learning_rate=1e-3)
    return fit_reward_model(load_policy(start(), **CPU), them, config, seed=0, report=lambda *_: None)


def reward_model(swapped: float, bound: float = 0.45) -> Play:
    def play(patch: Patches) -> Verdict:
        found = fitted(pairs(swapped))
        return stopped_by(lambda: require_labels(label_noise([each.margin for each in found.suspects]), bound))

    return play


def read_early(patch: Patches) -> Verdict:
    model = ScalarModel.with_random_head(load_policy(start(), **CPU), torch.Generator().manual_seed(0))
    scores = ScalarModel._scalars
    patch.set(ScalarModel, "_scalars", lambda self, batch, places: scores(self, batch, (places - 1).clamp(min=0)))
    from rlcore.models.heads import score_rewards

    sequences = [side for pair in pairs(0.0)[:2] for side in pair.sides]
    return stopped_by(
        lambda: require_last_token(model, score_rewards(model, sequences, tokens_per_microbatch=512), sequences)
    )


assert contextlib and KlConfig and require_saved

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
    "a user's reward looks at its whole batch (no fault)": own_reward(by_batch),
    "a user's reward becomes infinite": own_reward(not_finite),
    "a user's reward raises later": own_reward(raises_later),
    "a user's reward cannot score a quarter": own_reward(scores_few),
    "SFT: the end is not trained on": sft(without_end),
    "SFT: the mask is one to the left": sft(mask_to_the_left),
    "SFT: answers are moved against prompts, as tokens": sft(rotated),
    "SFT: answers are moved against prompts, in the rows": sft(rotated, rows=True),
    "SFT: prompts are trained on too": sft(
        lambda them: [
            Demonstration(
                sequence=dataclasses.replace(
                    one.sequence,
                    prompt_ids=one.sequence.prompt_ids[:1],
                    completion_ids=one.sequence.prompt_ids[1:] + one.sequence.completion_ids,
                ),
                loss_mask=(True,) * (len(one.sequence.prompt_ids) - 1 + len(one.loss_mask)),
            )
            for one in them
        ]
    ),
    "reward model: a tenth of the labels is swapped (bound 0.05)": reward_model(0.1, 0.05),
    "reward model: half of the labels are swapped": reward_model(0.5),
    "reward model: labels are swapped in training and evaluation": reward_model(1.0),
    "reward model: the score is read one token early": read_early,
}
