"""Programs that ask a grader for verdicts, each run in a process of its own, which is killed at a deadline.

    python tests/peers/grader_programs.py trl-in-a-thread | verl-after-towers | ours-after-towers

Prints one JSON list of the scores of right answers that followed answers whose evaluation never ends.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

TOWER, RIGHT = r"\boxed{9^{9^9}}", r"\boxed{5}"


def trl_in_a_thread() -> list[object]:
    """TRL's accuracy reward off the main thread, where it turns the timeouts of math_verify off."""
    from trl.rewards import accuracy_reward

    scores: list[object] = []

    def grade() -> None:
        completions = [[{"role": "assistant", "content": answer}] for answer in (TOWER, RIGHT)]
        scores.extend(accuracy_reward(completions, ["$5$", "$5$"]))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    return scores[1:]


def verl_after_towers() -> list[object]:
    """verl's grader: four towers and then right answers under its default limit of 30 s, its four workers warm."""
    from verl.utils.reward_score.math_verify import compute_score

    with ThreadPoolExecutor(4) as callers:
        warm = list(callers.map(partial(compute_score, timeout=600.0), [RIGHT] * 8, ["5"] * 8))
        assert warm == [1.0] * 8  # its workers have loaded their libraries
        list(callers.map(compute_score, [TOWER] * 4, ["5"] * 4))
        return list(callers.map(compute_score, [RIGHT] * 2, ["5"] * 2))


def ours_after_towers() -> list[object]:
    """Ours kills the worker: a tower is unscored, what follows is graded."""
    from rlcore.rewards.math_answer import MathReward
    from rlcore.types import Prompt, Rollout

    prompt = Prompt(prompt_id="p", messages=(), token_ids=(1,), reference="5", task="math")

    def rollout(text: str) -> Rollout:
        return Rollout(
            prompt=prompt,
            completion_ids=(1,),
            sampler_logprobs=(0.0,),
            loss_mask=(True,),
            policy_version=0,
            finish_reason="stop",
            text=text,
        )

    scores = MathReward()([rollout(text) for text in [TOWER] * 4 + [r"\boxed{\frac{10}{2}}", RIGHT]])
    assert [score.value for score in scores[:4]] == [None] * 4
    return [score.value for score in scores[4:]]


PROGRAMS: dict[str, Callable[[], list[object]]] = {
    "trl-in-a-thread": trl_in_a_thread,
    "verl-after-towers": verl_after_towers,
    "ours-after-towers": ours_after_towers,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROGRAMS[sys.argv[1]]()) + "\n")
    sys.stdout.flush()
