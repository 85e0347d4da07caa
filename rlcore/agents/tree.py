"""Episodes of agents as text: the tree of calls with tokens and forks, and what is wrong with the environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rlcore.agents.sampler import Episode
from rlcore.agents.session import Call
from rlcore.errors import shown

_MAX_TEXT = 60  # characters of an answer
_LAST_LINES = 5  # of the output of an agent that failed
_MISSING = {
    "No module named|Cannot find module|ModuleNotFound": "add the module to files, or its folder to sandbox_read",
    "No such file|ENOENT|cannot open|not found": "add the file to files, or its path to sandbox_read",
    "Network is unreachable|name resolution|not known|resolve host|ENETUNREACH|EAI_AGAIN|ENOTFOUND|ECONNREFUSED|"
    "Connection refused": "there is no network but the gateway; an agent that needs one has sandbox = false",
    "Read-only file system|EROFS": "write in the current folder or /tmp",
    "No space left|ENOSPC|Cannot allocate|MemoryError|limit [0-9]+": "its limits are in the page on own agents",
}


def episode_lines(episode: Episode, *, result: str) -> list[str]:
    """Return an episode as lines: its result, its calls indented by samples, and the output of a failed agent."""
    record = episode.record
    num_samples = len(record.rollout.samples) if record.rollout else 0
    head = f"{episode.prompt.prompt_id}: {result}; calls={len(record.calls)} samples={num_samples}"
    depths: dict[int, int] = {}
    lines = [head]
    for call in record.calls:
        depth = depths.get(call.parent or 0, 0) + bool(call.fork)
        depths[call.number] = depth
        lines += ["  " * (depth + 1) + text for text in _call_lines(call)]
    lines += [f"  refused: {shown(text)}" for text in record.refused]
    if episode.failure:
        lines.append(f"  the agent failed: {episode.failure}")
        lines += [f"  | {shown(line)}" for line in episode.ended.output.splitlines()[-_LAST_LINES:]]
    return lines


def advice(episodes: Sequence[Episode], *, is_boxed: bool = False) -> Iterator[str]:
    """Yield what is wrong with an agent or costs more than it must, in plain words."""
    outputs = [each.ended.output for each in episodes if each.failure and is_boxed]
    for pattern, fix in _MISSING.items():
        if found := [line for text in outputs for line in re.findall(f".*(?:{pattern}).*", text)[-1:]]:
            yield f"{len(found)} agents miss something in the sandbox ({shown(found[0].strip())}): {fix}"
    silent = [each for each in episodes if not each.record.calls]
    if silent:
        hint = "the agent must call OPENAI_BASE_URL with the key OPENAI_API_KEY, as clients of OpenAI do by themselves"
        hint = "see the end of their output" if any(each.failure for each in silent) else hint
        yield f"{len(silent)} of {len(episodes)} agents had no call answered: {hint}"
    if refused := Counter(text for each in episodes for text in each.record.refused):
        yield f"{sum(refused.values())} calls were refused, most often: {shown(refused.most_common(1)[0][0])}"
    if late := [each for each in episodes if each.ended.is_late]:
        yield f"{len(late)} agents did not end in time: raise timeout_seconds, or let the agent end after its answer"
    yield from _forks(episodes)
    cut = [call for each in episodes for call in each.record.calls if call.finish_reason == "length"]
    if cut:
        yield (
            f"{len(cut)} answers were cut at a limit on tokens, which ends a sample: raise sampling.max_new_tokens, or "
            "the max_tokens that the agent asks for"
        )


def _forks(episodes: Sequence[Episode]) -> Iterator[str]:
    samples = [len(each.record.rollout.samples) for each in episodes if each.record.rollout]
    if sum(samples) == len(samples):
        return
    reasons = Counter(call.fork for each in episodes for call in each.record.calls if call.fork)
    yield (
        f"{sum(samples)} samples for {len(samples)} episodes: each costs a forward pass of its whole history. An "
        "episode stays one sample while the agent only appends to the messages that it sent before. Most often: "
        f"{shown(reasons.most_common(1)[0][0])}"
    )


def _call_lines(call: Call) -> list[str]:
    text = shown(" ".join(call.text.split()), max_chars=_MAX_TEXT)
    line = (
        f"{call.number} {call.kind:<9} {call.num_prompt_tokens:>6} prompt tokens {call.num_sampled_tokens:>5} sampled "
        f"{call.seconds:>6.2f} s  '{text}'" + (" (cut)" if call.finish_reason == "length" else "")
    )
    return [f"new sample: {call.fork}", line] if call.fork else [line]
