"""Faults around runs: resume, saving, evaluation, users' rewards, supervised stages; and sound stages."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.injectors import Inject, Turn, always, arg, at
from benchmarks.faults.lab import (
    CPU,
    EVALUATED,
    SFT,
    Diary,
    KilledError,
    Verdict,
    components_of,
    new_folder,
    played,
    rows_of_sums,
    scratch,
    start,
    stopped_by,
)
from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.config import CheckpointConfig, RewardModelConfig, SftConfig
from rlcore.evaluation.intervals import pair_accuracy
from rlcore.loop import Components, train
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.integrity import verify_model, write_model_digest
from rlcore.models.loading import load_policy, save_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward
from rlcore.sampling.native import NativeSampler
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit import shuffle_gap, supervised_data
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_model import Fitted, RewardLearner, fit_reward_model, reward_members
from rlcore.training.sft import SftLearner, run_sft_steps
from rlcore.types import Message, Rollout

Play = Callable[[ExitStack], Verdict]
Rows = list[tuple[tuple[Message, ...], str]]
OFTEN: dict[str, Any] = {"checkpoints": CheckpointConfig(every_iterations=1)}


def _resumed(scene: str, injects: Sequence[Inject], stack: ExitStack, *, change: Turn = lambda made: made) -> Verdict:
    folder = new_folder()
    components = components_of(scene, folder=folder, **OFTEN)
    with contextlib.suppress(KilledError), contextlib.closing(components.learner):
        train(components, Diary(killed_after=3))
    for inject in injects:
        inject(stack)
    return played(lambda: change(components_of(scene, folder=folder, **OFTEN)))


def _restored(name: str, value: Any) -> Inject:
    return arg("training.checkpoint:_restore", scalars=lambda found: {**found, name: value})


def _reanchored(components: Components) -> Components:
    learner: Any = components.learner
    load = learner.load

    def restore(*given: Any, **more: Any) -> Any:
        found = load(*given, **more)
        learner.reference.load_state_dict(learner.learner.policy.state_dict())
        return found

    learner.load = restore
    return components


def _other_prompts(components: Components) -> Components:
    return replace(components, prompts=[replace(one, reference=one.reference + "0") for one in components.prompts])


def _trained() -> Components:
    components = components_of("grpo", num_iterations=2)
    train(components, Diary())
    return components


def _saving(change: Callable[[Any], dict[str, torch.Tensor]], stack: ExitStack) -> Verdict:
    """Train, and save the start with some tensors of the trained policy."""
    learner: Any = _trained().learner
    written = load_policy(start(), **CPU)
    written.load_state_dict(change(learner.learner.policy.state_dict()), strict=False)
    place = "models.runtime:save_model"
    at(place, lambda _, policy, *rest, **more: save_model(written, *rest, **more))(stack)
    return stopped_by(lambda: learner.save_model(start(), new_folder()))


def _evaluation(
    change: Callable[[Path], Any], stack: ExitStack, *, stage: str = "grpo", engine: bool = False
) -> Verdict:
    """Seal a trained model, change it, and load it for evaluation."""
    components, folder, runtime = _trained(), new_folder(), Runtime(**_RUNTIME)
    folder.mkdir()
    components.learner.save_model(start(), folder / "model")
    write_model_digest(folder, stage="grpo", model=folder / "model")
    change(folder / "model")

    def take_up() -> None:
        tokenizer = verify_model(folder, stage=stage, model=folder / "model")
        sampler = NativeSampler(load_policy(start() if engine else folder / "model", **CPU), tokenizer)
        verify_served_weights(sampler, folder / "model", components.prompts[:2], runtime, seed=0)

    return stopped_by(take_up)


_RUNTIME: dict[str, Any] = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


def _template_changed(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text("Be brief. " + path.read_text(encoding="utf-8"), encoding="utf-8")


def _weights_exchanged(model: Path) -> None:
    (model / "model.safetensors").write_bytes((start() / "model.safetensors").read_bytes())


def _own(function: Callable[[Sequence[Rollout]], list[Any]], stack: ExitStack, *, minutes: float = 60.0) -> Verdict:
    reward = WeightedReward([WeightedTerm(FunctionReward(function, "own", timeout_minutes=minutes), 1.0)])
    return played(lambda: replace(components_of("grpo", num_iterations=20), reward=reward))


def _hangs(rollouts: Sequence[Rollout]) -> list[Any]:
    if rollouts[0].policy_version >= 2:
        threading.Event().wait(600.0)
    return [-float(len(one.completion_ids)) for one in rollouts]


def _other_order(rollouts: Sequence[Rollout]) -> list[Any]:
    values = [-float(len(one.completion_ids)) for one in rollouts]
    return [*values[1:], values[0]] if rollouts[0].policy_version >= 2 else values


def _overlapping(stack: ExitStack) -> Verdict:
    components: Any = components_of(EVALUATED)
    held_out = replace(components.held_out, prompts=[*components.held_out.prompts, components.prompts[3]])
    return played(lambda: replace(components, held_out=held_out))


def _stories() -> Rows:
    names = [", ".join(f"name{number + place}" for place in range(3)) for number in range(0, 300, 3)]
    return [((Message(role="user", content=f"who are {each}?"),), f"friends: {each}") for each in names]


def _sft(given: Callable[[], Rows], stack: ExitStack, *, rows: Turn = list, tokens: Turn = list) -> Verdict:
    """Train as the stage does, with the fault in the rows or their tokens."""
    tokenizer, model, said = ChatTokenizer.load(scratch()), load_policy(scratch(), **CPU), rows(given())
    made = tokens([render_conversation(tokenizer, messages, answer) for messages, answer in said])

    def work() -> None:
        supervised_data.require_demonstrations(said, made, tokenizer)
        shuffle_gap.require_rare_word_matches(shuffle_gap.match_rare_words(said), SftConfig.min_rare_word_match)
        run_sft_steps(SftLearner(model, SFT), made[::2], made[1::2], SFT, seed=0, report=lambda *_: None)
        found = shuffle_gap.measure_shuffle_gap(model, made[1::2], tokens_per_microbatch=4096, seed=0)
        shuffle_gap.require_shuffle_gap(found, SftConfig.min_shuffle_gap)

    return stopped_by(work)


def _demonstration(one: Demonstration, mask: Any, **ids: Any) -> Demonstration:
    return Demonstration(sequence=replace(one.sequence, **ids), loss_mask=tuple(mask))


def _without_end(them: list[Demonstration]) -> list[Demonstration]:
    return [_demonstration(one, one.loss_mask[:-1], completion_ids=one.sequence.completion_ids[:-1]) for one in them]


def _mask_to_the_left(them: list[Demonstration]) -> list[Demonstration]:
    return [_demonstration(one, (*one.loss_mask[1:], False)) for one in them]


def _rotated(them: list[Demonstration]) -> list[Demonstration]:
    others = [them[place - 7] for place in range(len(them))]
    pairs = zip(them, others, strict=True)
    return [_demonstration(a, b.loss_mask, completion_ids=b.sequence.completion_ids) for a, b in pairs]


def _on_prompts(them: list[Demonstration]) -> list[Demonstration]:
    whole = [one.sequence.prompt_ids + one.sequence.completion_ids for one in them]
    return [
        _demonstration(one, [True] * (len(ids) - 1), prompt_ids=ids[:1], completion_ids=ids[1:])
        for one, ids in zip(them, whole, strict=True)
    ]


def _answers_moved(rows: Rows) -> Rows:
    return [(messages, rows[place - 7][1]) for place, (messages, _) in enumerate(rows)]


def _pairs(swapped: float, *, first: int = 0) -> list[TokenPair]:
    """Return right answers against wrong ones of the same length, a fraction swapped."""
    tokenizer, draws, found = ChatTokenizer.load(start()), random.Random(1), []
    for number in range(first, first + 400):
        question, total = f"{number // 20}+{number % 20}", number // 20 + number % 20
        asked, sides = [Message(role="user", content=question)], [f"{question}={total}", f"{total}={question}"]
        if draws.random() < swapped:
            sides.reverse()
        (prompt_ids, chosen), (_, rejected) = (tokenizer.render_demonstration(asked, side) for side in sides)
        found.append(TokenPair(set_id=str(number), prompt_ids=prompt_ids, chosen_ids=chosen, rejected_ids=rejected))
    return found


def _fitted(them: list[TokenPair]) -> Fitted:
    config = RewardModelConfig(num_epochs=1, batch_size=16, learning_rate=1e-3, head_learning_rate=1e-3)
    learner = RewardLearner(reward_members(load_policy(start(), **CPU), config, seed=0), config)
    return fit_reward_model(learner, them, config, seed=0, report=lambda *_: None)


def _reward_model(swapped: float, bound: float, stack: ExitStack) -> Verdict:
    """Fit a reward model on pairs, and check its labels as the stage does."""
    noise = supervised_data.label_noise([each.margin for each in _fitted(_pairs(swapped)).suspects])
    verdict = stopped_by(lambda: supervised_data.require_labels(noise, bound))
    cannot = verdict.caught == "silent" and "cannot tell" in str(noise)
    return Verdict(caught="warned", steps=0, message=str(noise)) if cannot else verdict


def _anchored(swapped: float, stack: ExitStack) -> Verdict:
    sides = [side for pair in _pairs(0.0, first=400)[:50] for side in pair.sides]
    scores = _fitted(_pairs(swapped)).score(sides).mean(dim=0)
    return stopped_by(lambda: supervised_data.require_gold_pairs(pair_accuracy(scores[::2] - scores[1::2])))


def _read_early(stack: ExitStack) -> Verdict:
    model = ScalarHeadModel.with_random_head(load_policy(start(), **CPU), torch.Generator().manual_seed(0))
    arg("models.heads:ScalarHeadModel._scalars", positions=lambda them: (them - 1).clamp(min=0))(stack)
    sides = [side for pair in _pairs(0.0)[:2] for side in pair.sides]
    return stopped_by(
        lambda: supervised_data.require_last_token(model, score_rewards(model, sides, tokens_per_microbatch=512), sides)
    )


NOISE = RewardModelConfig.max_label_noise
_LOST = {name: at(f"training.checkpoint:_restore_{name}", always(None)) for name in ("weights", "optimizer")}
_KL = "grpo, KL in the loss"
OUTSIDE: dict[str, Play] = {
    "resume: weights are not restored": partial(_resumed, "grpo", [_LOST["weights"]]),
    "resume: the optimizer is not restored": partial(_resumed, "grpo", [_LOST["optimizer"]]),
    "resume: nothing is restored": partial(_resumed, "ppo", [*_LOST.values()]),
    "resume: the iteration is another": partial(
        _resumed, "grpo", [arg("loop.run:Run.restore", state=lambda state: {**state, "iteration": 1})]
    ),
    "resume: the policy's version is another": partial(_resumed, "grpo", [_restored("policy_version", 1)]),
    "resume: the KL's coefficient is another": partial(_resumed, _KL, [_restored("kl_coefficient", 0.9)]),
    "resume: the reference is the interrupted policy": partial(_resumed, _KL, [], change=_reanchored),
    "resume: the prompts' references are others": partial(_resumed, "grpo", [], change=_other_prompts),
    "the start is saved in place of what was trained": partial(_saving, lambda state: {}),
    "half of what was trained is saved": partial(
        _saving, lambda state: {name: value for name, value in state.items() if "layers.0" in name}
    ),
    "weights are rounded when they are saved": partial(
        _saving, lambda state: {name: (64.0 * value).round() / 64.0 for name, value in state.items()}
    ),
    "another stage's model is evaluated": partial(_evaluation, lambda _: None, stage="ppo"),
    "the evaluation's engine serves the start": partial(_evaluation, lambda _: None, engine=True),
    "the evaluated weights were exchanged on disk": partial(_evaluation, _weights_exchanged),
    "the evaluation has another chat template": partial(_evaluation, _template_changed),
    "a user's reward hangs": partial(_own, _hangs, minutes=0.02),
    "a user's reward gives its values in another order, later": partial(_own, _other_order),
    "a user's reward is random": partial(_own, lambda them: [random.random() for _ in them]),
    "a user's reward becomes infinite": partial(
        _own, lambda them: [float("inf") if one.policy_version >= 2 else 1.0 for one in them]
    ),
    "a user's reward raises later": partial(_own, lambda them: [1.0 / (2 - one.policy_version) for one in them]),
    "a user's reward cannot score a quarter": partial(
        _own, lambda them: [None if place % 4 == 0 else 1.0 for place, _ in enumerate(them)]
    ),
    "SFT: the end is not trained on": partial(_sft, rows_of_sums, tokens=_without_end),
    "SFT: the mask is one to the left": partial(_sft, rows_of_sums, tokens=_mask_to_the_left),
    "SFT: prompts are trained on too": partial(_sft, rows_of_sums, tokens=_on_prompts),
    "SFT: answers are moved against prompts, as tokens": partial(_sft, rows_of_sums, tokens=_rotated),
    "SFT: answers are moved against prompts, in rows of text": partial(_sft, _stories, rows=_answers_moved),
    "SFT: answers are moved against prompts, in rows of sums": partial(_sft, rows_of_sums, rows=_answers_moved),
    "reward model: a fifth of the labels is swapped, bound 0.05": partial(_reward_model, 0.2, 0.05),
    "reward model: half of the labels are swapped": partial(_reward_model, 0.5, NOISE),
    "reward model: all labels are swapped": partial(_reward_model, 1.0, NOISE),
    "reward model: all labels are swapped, with 50 anchors": partial(_anchored, 1.0),
    "reward model: the score is read one token early": _read_early,
    "held-out prompts are trained on": _overlapping,
}
SOUND: dict[str, Play] = {
    "SFT of sums": partial(_sft, rows_of_sums),
    "SFT of text": partial(_sft, _stories),
    "reward model": partial(_reward_model, 0.0, 0.05),
    "reward model, with 50 anchors": partial(_anchored, 0.0),
}
