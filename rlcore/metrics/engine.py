"""The metrics of a rollout engine in processes of its own; logged where a run has one."""

from __future__ import annotations

from rlcore.metrics.base import Metric

SERVER = (
    Metric(
        name="engine/running",
        formula="largest number of requests in the engine's batch, looked at four times a second",
        unit="requests",
        healthy="near sampling.max_concurrent",
        meaning="How many completions are decoded together.",
        fix="far below: fewer rollouts an iteration than that, or engine/waiting says why",
    ),
    Metric(
        name="engine/waiting",
        formula="largest number of requests that the engine had accepted and not begun",
        unit="requests",
        healthy="near 0",
        meaning="Back-pressure: the engine is asked for more than it has room for.",
        fix="lower sampling.max_concurrent, or give it more key-value cache (engine/kv_use)",
    ),
    Metric(
        name="engine/kv_use",
        formula="largest share of the key-value cache in use",
        unit="share",
        healthy="below 0.9",
        meaning="How full the engine's memory for tokens is.",
        fix="raise engine.kv_cache_gib or engine.memory_fraction; lower sampling.max_concurrent",
    ),
    Metric(
        name="engine/preemptions",
        formula="completions that were thrown out of the cache and computed again, since the last iteration",
        unit="completions",
        healthy="0",
        meaning="The cache is too small for what is under way; work is done twice.",
        fix="as for engine/kv_use",
    ),
    Metric(
        name="engine/tokens_per_second",
        formula="tokens generated / seconds of sampling, held-out problems included",
        unit="tokens per second",
        healthy="steady; compare with the share of seconds/rollout",
        meaning="Speed of the engine alone.",
        fix="more sampling.max_concurrent while engine/waiting is 0; engine.eager = false on a GPU",
    ),
    Metric(
        name="engine/prefix_hits",
        formula="prompt tokens found in the prefix cache / prompt tokens looked up",
        unit="share of tokens",
        healthy="near (group_size - 1) / group_size, less for short prompts: whole blocks alone are found",
        meaning="How much of a group's shared prompt is computed once.",
        fix="0 with long prompts: the server was started without prefix caching",
    ),
    Metric(
        name="engine/asked_again",
        formula="completions that timed out, broke off or were aborted, and were asked for again",
        unit="completions",
        healthy="0",
        meaning="Trouble that cost time and nothing else: what fails three times is a failed rollout.",
        fix="raise engine.deadlines.request_seconds if they time out; look at the engine's log if it died",
    ),
)
