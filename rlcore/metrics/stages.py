"""The metrics of the engine, of speed and memory, and of the other stages: SFT, reward model, evaluation."""

from __future__ import annotations

from rlcore.metrics.base import Metric

ENGINE = (
    Metric(
        name="mismatch/mean_abs",
        formula="mean of |old_logprobs - sampler_logprobs|",
        unit="nats per token",
        healthy="below 1e-4 in float32, below 0.1 in bfloat16",
        meaning="Engine and trainer compute the same weights differently by this much.",
        fix="same precision on both sides; check that the engine has the trainer's temperature and weights",
    ),
    Metric(
        name="mismatch/max_abs",
        formula="max of |old_logprobs - sampler_logprobs|",
        unit="nats",
        healthy="below 1e-3 in float32, below 0.5 in bfloat16",
        meaning="The worst token of the iteration.",
        fix="as for mismatch/mean_abs",
    ),
    Metric(
        name="mismatch/kl",
        formula="mean of exp(d) - d - 1, d = old_logprobs - sampler_logprobs",
        unit="nats per token",
        healthy="below 1e-3",
        meaning="KL(engine || trainer).",
        fix="as for mismatch/mean_abs",
    ),
    Metric(
        name="mismatch/ess",
        formula="(Σ w)² / (n Σ w²), w = exp(old_logprobs - sampler_logprobs)",
        unit="share of tokens",
        healthy="above 0.9",
        meaning="Effective sample size left after importance weighting.",
        fix="lower staleness; same precision on both sides",
    ),
    Metric(
        name="mismatch/rejected",
        formula="share of tokens whose weight lies outside [low, high]",
        unit="share of tokens",
        healthy="below 0.01",
        meaning="Tokens that the correction leaves out (mode mask).",
        fix="as for mismatch/ess",
    ),
    Metric(
        name="policy_version",
        formula="number of updates since the start",
        unit="updates",
        healthy="rises by 1 per iteration",
        meaning="Version of the learner's weights.",
        fix="standing still: updates fail, look at the log",
    ),
    Metric(
        name="staleness",
        formula="learner's policy_version - rollouts' policy_version, mean",
        unit="updates",
        healthy="0 when synchronous, at most 1 when asynchronous",
        meaning="How old the weights were that sampled.",
        fix="sync more often, or sample less ahead",
    ),
    Metric(
        name="sync/max_abs",
        formula="max of |engine's - learner's log-probability| on the probe text, after a sync",
        unit="nats",
        healthy="below 1e-3 in float32, below 0.5 in bfloat16",
        meaning="Proof that the engine serves the new weights.",
        fix="beyond the bound the run stops by itself: the weights arrived partly or not at all",
    ),
    Metric(
        name="sync/moved",
        formula="max of |engine's log-probability after - before the sync| on the probe text",
        unit="nats",
        healthy="above 0 after every update that took a step",
        meaning="How far the sync moved the engine.",
        fix="0 after a step stops the run: the engine kept its old weights",
    ),
)

COSTS = (
    Metric(
        name="rollouts/count",
        formula="completions drawn in the iteration, replaced groups included",
        unit="completions",
        healthy="prompts_per_iteration * group_size, and what dynamic sampling adds",
        meaning="What the iteration cost in samples.",
        fix="lower group_size or max_replacements",
    ),
    Metric(
        name="rollouts/tokens",
        formula="completion tokens drawn in the iteration, replaced groups included",
        unit="tokens",
        healthy="grows only as completion/length does",
        meaning="What the iteration cost in sampled tokens.",
        fix="lower max_new_tokens; a length penalty",
    ),
    Metric(
        name="tokens_per_second",
        formula="completion tokens / seconds of the whole iteration",
        unit="tokens/s",
        healthy="steady",
        meaning="Throughput of the loop.",
        fix="the longest of seconds/* says where the time goes",
    ),
    *(
        Metric(
            name=f"seconds/{step}",
            formula="wall-clock time",
            unit="s",
            healthy="steady for a steady completion/length",
            meaning=f"Time of one iteration spent {doing}.",
            fix=fix,
        )
        for step, doing, fix in (
            ("rollout", "sampling", "raise sampling.max_concurrent; a faster engine"),
            ("score", "grading", "more num_workers; cheaper rewards"),
            ("update", "on advantages and optimizer steps", "raise tokens_per_microbatch; fewer epochs"),
            ("sync", "moving weights to the engine and proving it", "share the weights with the engine"),
            ("evaluate", "on held-out problems", "raise eval_every or lower num_monitor_problems"),
        )
    ),
    Metric(
        name="memory/peak_gib",
        formula="largest memory of the device, or of the process on a CPU",
        unit="GiB",
        healthy="below what the machine has",
        meaning="Peak memory of the stage.",
        fix="lower tokens_per_microbatch or max_concurrent",
    ),
)

STAGES = (
    Metric(
        name="data/accepted",
        formula="number of rows that passed the gate",
        unit="rows",
        healthy="data/accepted + data/quarantined = lines read",
        meaning="Size of the dataset that training sees.",
        fix="0: the stage fails; look at the gate's report",
    ),
    Metric(
        name="data/quarantined",
        formula="number of rows that a rule refused",
        unit="rows",
        healthy="below max_quarantined of the lines",
        meaning="Rows set aside, each with its reasons.",
        fix="read the quarantine file; repair the source or the adapter",
    ),
    Metric(
        name="eval/accuracy",
        formula="right answers / problems, greedy",
        unit="share of problems",
        healthy="rises with reward/mean",
        meaning="Held-out accuracy: what the run is for.",
        fix="falling while the reward rises: the reward is gamed, or the KL to the reference is too large",
    ),
    Metric(
        name="eval/accuracy_low",
        formula="lower end of the Wilson interval",
        unit="share of problems",
        healthy="close to eval/accuracy",
        meaning="Lower bound at the configured confidence.",
        fix="wide: evaluate more problems",
    ),
    Metric(
        name="eval/accuracy_high",
        formula="upper end of the Wilson interval",
        unit="share of problems",
        healthy="close to eval/accuracy",
        meaning="Upper bound at the configured confidence.",
        fix="wide: evaluate more problems",
    ),
    Metric(
        name="eval/pass_<k>",
        formula="mean of 1 - C(n - c, k) / C(n, k) over problems; _low and _high: bootstrap interval",
        unit="share of problems",
        healthy="rises, or holds while accuracy rises",
        meaning="Chance that one of k samples is right.",
        fix="falling: the policy loses variety; see entropy",
    ),
    Metric(
        name="eval/problems",
        formula="number of held-out problems",
        unit="problems",
        healthy="200 or more for intervals within 7 points",
        meaning="Size of the evaluation.",
        fix="raise evaluation.num_problems",
    ),
    Metric(
        name="sft/loss",
        formula="-mean log-probability of the completion tokens of a step",
        unit="nats per token",
        healthy="falls",
        meaning="Training loss of supervised fine-tuning.",
        fix="flat: raise sft.learning_rate; check that completions are not cut",
    ),
    Metric(
        name="sft/eval_loss",
        formula="-mean log-probability of held-out completion tokens",
        unit="nats per token",
        healthy="falls with sft/loss",
        meaning="Held-out loss of supervised fine-tuning.",
        fix="rising: overfitting, fewer steps or more demonstrations",
    ),
)
