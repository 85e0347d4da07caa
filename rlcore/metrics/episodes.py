"""The metrics of multi-turn episodes; logged where a run has tools."""

from __future__ import annotations

from rlcore.metrics.base import Metric

EPISODES = (
    Metric(
        name="episode/turns",
        formula="mean number of turns, the answer included",
        unit="turns",
        healthy="what the task needs; below episodes.max_turns",
        meaning="How often the policy speaks in an episode.",
        fix="at the limit: calls that lead nowhere, see episode/tool_errors; 1: the policy never calls",
    ),
    Metric(
        name="episode/with_calls",
        formula="share of episodes with at least one tool call",
        unit="share of rollouts",
        healthy="rises where the tool helps",
        meaning="Whether the policy uses its tools at all.",
        fix="stuck at 0: demonstrations with calls in SFT, or say in the prompt how a call is written",
    ),
    Metric(
        name="episode/tool_calls",
        formula="mean number of answered tool calls",
        unit="calls per rollout",
        healthy="settles at what the task needs",
        meaning="How much the tools are used.",
        fix="growing without better answers: lower episodes.max_turns or reward short episodes",
    ),
    Metric(
        name="episode/tool_errors",
        formula="calls that were answered with an error message / calls (0 without a call)",
        unit="share of calls",
        healthy="falls below 0.05",
        meaning="Calls that the policy got wrong: malformed, unknown tool, a failing program.",
        fix="read tool outputs in the rollout table; show the syntax in prompts or demonstrations",
    ),
    Metric(
        name="episode/tool_tokens",
        formula="completion tokens that are not the policy's / completion tokens",
        unit="share of tokens",
        healthy="below 0.8",
        meaning="How much of the context is tool output, which is read and never trained on.",
        fix="lower episodes.max_output_tokens or num_passages",
    ),
)
