"""The metrics of rejection sampling."""

from __future__ import annotations

from rlcore.metrics.base import Metric

REJECTION = tuple(
    Metric(name=f"rejection/{name}", formula=formula, unit=unit, healthy=healthy, meaning=meaning, fix=fix)
    for name, formula, unit, healthy, meaning, fix in (
        (
            "sampled",
            "number of answers that were sampled",
            "answers",
            "prompts times num_samples",
            "Size of what rejection sampling chose from.",
            "fewer: the engine failed on some prompts",
        ),
        (
            "verified",
            "number of answers with a score of the threshold and more",
            "answers",
            "enough for SFT",
            "What the graders let through.",
            "0: the threshold is out of the reward's reach, or the policy cannot do it yet",
        ),
        (
            "kept",
            "number of answers that became demonstrations",
            "answers",
            "close to the number of prompts times keep_per_prompt",
            "Size of the dataset that the SFT after it sees, before the gate.",
            "rejection.json says how many went for which reason",
        ),
        (
            "pass_rate",
            "mean over prompts of verified / sampled; _low and _high: bootstrap interval over prompts",
            "share of answers",
            "0.2 to 0.95",
            "How often the policy is right when it samples.",
            "near 1: the prompts are too easy to teach it more; near 0: too hard",
        ),
        (
            "pass_rate_low",
            "lower end of the bootstrap interval",
            "share of answers",
            "close to rejection/pass_rate",
            "Lower bound at 95 %.",
            "wide: more prompts",
        ),
        (
            "pass_rate_high",
            "upper end of the bootstrap interval",
            "share of answers",
            "close to rejection/pass_rate",
            "Upper bound at 95 %.",
            "wide: more prompts",
        ),
        (
            "solved",
            "share of prompts with a verified answer",
            "share of prompts",
            "above rejection/pass_rate",
            "How much of the prompts the kept answers cover.",
            "low: raise num_samples",
        ),
    )
)
