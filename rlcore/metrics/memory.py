"""The metrics of memory by part: what the first update of an online-RL run that moves the policy holds."""

from __future__ import annotations

from rlcore.metrics.base import Metric

MEMORY = (
    *(
        Metric(
            name=f"memory/{part}_bytes",
            formula=formula,
            unit="bytes",
            healthy="the same for the same settings",
            meaning=f"{meaning}, in the first update that moves the policy.",
            fix=fix,
        )
        for part, formula, meaning, fix in (
            (
                "weights",
                "weights and buffers of policy, reference, critic, reward model and engine, shared ones once",
                "What the models weigh",
                "update.adapter.rank > 0; critic.placement head or adapter; kl.coefficient = 0 needs no reference",
            ),
            ("gradients", "gradients before an optimizer step", "What learns, once more", "update.adapter.rank > 0"),
            ("optimizer", "Adam's moments", "What learns, twice more", "update.adapter.rank > 0"),
            (
                "activations",
                "largest sum of tensors kept for the backward pass at one time",
                "What a micro-batch keeps",
                "lower update.tokens_per_microbatch",
            ),
            (
                "kv_cache",
                "2 · layers · key-value heads · head width · sequences decoded together · longest sequence",
                "What the engine keeps of the sequences that it decodes",
                "lower sampling.max_concurrent",
            ),
            ("total", "sum of the parts", "All of it, were sampling and updating to meet", "look at the largest part"),
        )
    ),
    *(
        Metric(
            name=f"memory/total_multiple{suffix}",
            formula=f"memory/total_bytes / ({width} bytes · parameters of the policy)",
            unit="1",
            healthy="about 4 for what learns and 1 for each frozen copy, plus activations",
            meaning=f"The total in multiples of the policy's weights in {precision}.",
            fix="as for memory/total_bytes",
        )
        for suffix, width, precision in (("", 4, "float32"), ("_bf16", 2, "bfloat16"))
    ),
)
