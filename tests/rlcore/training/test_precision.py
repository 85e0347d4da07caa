"""bfloat16 products over float32 weights, exercised on the CPU: what hardware with bfloat16 units chooses by itself."""

from __future__ import annotations

import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.models.recompute import recompute_layers
from rlcore.training.learner import Learner
from tests import strategies
from tests.learners import gradients_of, on_policy_samples, update_config
from tests.rlcore.models.test_tree_attention import tree_llama


def learner(*, again: bool = False) -> Learner:
    """A learner of the model as a run loads it, initialised softly as a real one is: bfloat16 has 3 digits."""
    model = tree_llama(initializer_range=0.1)
    config = strategies.rl_config("grpo", update=update_config())
    return Learner(recompute_layers(model) if again else model, None, algorithm=ALGORITHMS["grpo"], config=config)


def test_gradients_of_bfloat16_products_are_float32_and_close() -> None:
    samples = on_policy_samples(tree_llama(initializer_range=0.1))
    exact = gradients_of(learner(), samples)
    for again in (False, True):
        half = learner(again=again)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = gradients_of(half, samples)
        assert ours.dtype == torch.float32
        assert {parameter.dtype for parameter in half.policy.parameters()} == {torch.float32}
        assert {state["exp_avg"].dtype for state in half.optimizer.state.values()} == {torch.float32}
        assert not torch.equal(ours, exact)  # it was bfloat16 indeed
        assert float((ours - exact).norm() / exact.norm()) < 0.05
