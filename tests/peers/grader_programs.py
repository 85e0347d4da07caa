"""Programs that ask a grader for verdicts, each run in a process of its own, which is killed at a deadline.

    python tests/peers/grader_programs.py trl-in-a-thread | verl-after-towers | ours-after-towers

Prints a JSON list of the scores of right answers, to show that it works at all, then one of the scores that endless
answers got, and right answers after them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rlcore.types import Prompt, Rollout

TOWER, RIGHT = r"\boxed{9^{9^9}}", r"\boxed{5}"


def say(scores: list[object]) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps(scores) + "\n")
    sys.stdout.flush()


def trl_in_a_thread() -> None:
    """TRL's accuracy reward off the main thread, where it turns the timeouts of math_verify off."""
    from trl.rewards import accuracy_reward

    def grade() -> None:
        for answers in ([RIGHT], [TOWER, RIGHT]):
            completions = [[{"role": "assistant", "content": answer}] for answer in answers]
            say(accuracy_reward(completions, ["$5$"] * len(answers)))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()


def verl_after_towers() -> None:
    """verl's grader: four towers and then right answers under its default limit of 30 s, its four workers warm."""
    from verl.utils.reward_score.math_verify import compute_score

    with ThreadPoolExecutor(4) as callers:
        say(list(callers.map(partial(compute_score, timeout=600.0), [RIGHT] * 8, ["5"] * 8)))
        towers = list(callers.map(compute_score, [TOWER] * 4, ["5"] * 4))
        say(towers + list(callers.map(compute_score, [RIGHT] * 2, ["5"] * 2)))


def ours_after_towers() -> None:
    """Ours kills the worker: a tower is unscored, what follows is graded."""
    from rlcore.rewards.math_answer import MathReward

    reward = MathReward()
    for answers in ([RIGHT], [TOWER] * 4 + [r"\boxed{y+y}", RIGHT]):
        say([score.value for score in reward([_rollout(text) for text in answers])])


def _rollout(text: str) -> Rollout:
    reference = "2y" if "y" in text else "5"  # 2y has to be worked out by the grader's process, 5 has not
    return Rollout(
        prompt=Prompt(prompt_id="p", messages=(), token_ids=(1,), reference=reference, task="math"),
        completion_ids=(1,),
        sampler_logprobs=(0.0,),
        loss_mask=(True,),
        policy_version=0,
        finish_reason="stop",
        text=text,
    )


PROGRAMS: dict[str, Callable[[], None]] = {
    "trl-in-a-thread": trl_in_a_thread,
    "verl-after-towers": verl_after_towers,
    "ours-after-towers": ours_after_towers,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
