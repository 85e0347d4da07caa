"""Episodes as MLflow traces: turns and tools in order, the reward as attributes, a few per iteration."""

from __future__ import annotations

import pytest

from rlcore.types import Message, Prompt, Rollout, Score, ScoredRollout, ToolCall
from tasks.episode_traces import TRACES, log_episodes
from tasks.settings import Home
from tasks.tracking import open_tracker

CALL = ToolCall(text="<tool:calculator>3+4</tool>", tool="calculator", output="7", is_error=False)


def episode(number: int, *calls: ToolCall) -> ScoredRollout:
    message = Message(role="user", content="3+4?")
    prompt = Prompt(prompt_id=f"p{number}", messages=(message,), token_ids=(1,), reference="7", task="t")
    rollout = Rollout(
        prompt=prompt,
        completion_ids=(5, 2),
        sampler_logprobs=(-0.5, -0.1),
        loss_mask=(True, True),
        policy_version=2,
        finish_reason="stop",
        text="#### 7",
        tool_calls=calls,
    )
    return ScoredRollout(rollout=rollout, score=Score(value=1.0, parts={"math": 1.0}))


# MLflow's tracing warns of type hints in MLflow when it is imported.
@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType")
def test_an_episode_is_a_trace_of_its_turns_and_tools_and_one_without_a_call_is_none(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("e", "r", tags={}) as run:
        log_episodes(run, 3, [[episode(0), episode(1, CALL)], [episode(number, CALL) for number in range(2, 20)]])
    traces = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert len(traces) == TRACES
    (first,) = [trace for trace in traces if trace.data.spans[0].name == "iteration 3: p1"]
    root, *spans = first.data.spans
    assert [span.name for span in spans] == ["turn", "calculator", "last turn"]
    assert [span.outputs["text"] for span in spans] == [CALL.text, "7", "#### 7"]
    assert (root.attributes["reward"], root.attributes["part/math"]) == ("1.0", "1.0")
    assert first.info.tags["iteration"] == "3"
