"""A run of the tiny preset that takes seconds: the same stages, everything smaller."""

from __future__ import annotations

MICRO = (
    "hardware.num_threads=1",
    "prompts.num_train=200",
    "prompts.num_eval=40",
    "demonstrations.num_train=800",
    "demonstrations.num_eval=20",
    "preferences.num_train=64",
    "preferences.num_eval=32",
    "model.shape.hidden_size=64",
    "model.shape.num_layers=2",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=128",
    "sft.num_steps=100",
    "reward_model.min_accuracy=0.0",
    "grpo.num_iterations=4",
    "grpo.prompts_per_iteration=4",
    "grpo.group_size=4",
    "grpo.eval_every=2",
    "grpo.checkpoints.iterations=1",
    "ppo.num_iterations=4",
    "ppo.prompts_per_iteration=4",
    "ppo.group_size=2",
    "ppo.eval_every=2",
    "ppo.checkpoints.iterations=1",
    "evaluation.num_problems=40",
    "evaluation.num_samples=2",
    "evaluation.num_sampled_problems=8",
    "evaluation.num_monitor_problems=8",
)

# Wrecks the policy: the rate rises to 0.0045 by the ninth step, the first iterations do no harm, and a rule sees it.
WRECKED = (
    "grpo.learning_rate=0.02",
    "grpo.update.optim.warmup_steps=40",
    "health.kl.warn=0.01",
    "health.kl.stop=0.05",
    "health.kl.patience=2",
)
