"""A run of the tiny preset that takes seconds: the same stages, everything smaller."""

from __future__ import annotations

from rlcore.flows.presets import FOLDER

EXTENDED = {"base", "chat", "preferences"}  # not whole by themselves: they require keys
PRESETS = sorted({path.stem for path in FOLDER.glob("*.toml")} - EXTENDED)  # those that are

MICRO = (
    "hardware.num_threads=1",
    "data.prompts.num_train=200",
    "data.prompts.num_eval=40",
    "data.demonstrations.num_train=800",
    "data.demonstrations.num_eval=20",
    "data.preferences.num_train=64",
    "data.preferences.num_eval=32",
    "model.shape.hidden_size=64",
    "model.shape.num_layers=2",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=128",
    "stages.sft.num_steps=100",
    "stages.reward_model.min_accuracy=0.0",
    "stages.grpo.num_iterations=4",
    "stages.grpo.prompts_per_iteration=4",
    "stages.grpo.group_size=4",
    "stages.grpo.eval_every=2",
    "stages.grpo.checkpoints.every_iterations=1",
    "stages.ppo.num_iterations=4",
    "stages.ppo.prompts_per_iteration=4",
    "stages.ppo.group_size=2",
    "stages.ppo.eval_every=2",
    "stages.ppo.checkpoints.every_iterations=1",
    "evaluation.num_problems=40",
    "evaluation.num_samples=2",
    "evaluation.num_sampled_problems=8",
    "evaluation.num_monitor_problems=8",
)

ONE_LAYER = (
    "model.shape.hidden_size=48",
    "model.shape.num_layers=1",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=96",
)

# Wrecks the policy whatever it has learned: the reward model's scores differ in every group, so every step is taken,
# and the rate rises from one that does no harm by as much with each. Measured in float32, bfloat16 and float16: a KL
# of 0.014 to 0.017 after three steps, 0.05 to 0.07 after four, 0.5 and more after eleven.
WRECKED = (
    "stages.grpo.rewards=[{kind='reward_model',stage='reward_model',weight=1.0}]",
    "stages.grpo.learning_rate=0.02",
    "stages.grpo.update.optim.warmup_steps=200",
    "health.kl.warn=0.01",
    "health.kl.stop=0.03",
    "health.kl.patience=2",
)
