"""Ways in which an agent misbehaves, each with its outcome: what it was told, and what is trained of its episode."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

import pytest

from rlcore.agents.sampler import AgentSampler, Episode, rollout_of
from rlcore.checks.canaries import mask_canary
from rlcore.config import AgentConfig
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.programs import agent
from tests.waiting import LONG, given_time, is_alive, until

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=100, num_samples=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """``told``: HTTP status of each call. ``failed``: reason of a failed rollout, as a pattern; else samples are kept.

    ``refused``: a pattern of an error that the agent read; ``finish``: of the episode; ``leaves``: in an engine call.
    """

    told: str = "200"
    failed: str = ""
    samples: int = 1
    sampled: int = 4  # tokens of "#### 7" with EOS; of all samples
    finish: str = "stop"
    refused: str = ""
    leaves: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)


GOOD = "call()\n"
RAW = "print(post('chat/completions', {!r})[0])\n"
LEAVE = """
body = json.dumps({"messages": USER, "stream": STREAM}).encode()
host, port = URL.split("/")[2].split(":")
with socket.create_connection((host, int(port))) as there:
    head = f"Host: localhost\\r\\nAuthorization: Bearer {KEY}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    there.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\n" + head.encode() + body)
    meet()
(ROOM / "left").touch()
"""
MEET = """
ROOM = Path({room!r})
(ROOM / "pid").write_text(str(os.getpid()))
def meet():
    while not (ROOM / "begun").exists():
        time.sleep(0.01)
"""
"""Client of an engine that begins a call when it has it, and ends it once the agent has left."""
MISBEHAVIOURS = {
    "ignores SIGTERM and hangs": (
        "[signal.signal(each, signal.SIG_IGN) for each in (1, 2, 15)]\ncall(); time.sleep(600)",
        Outcome(failed="timed out after"),
    ),
    "is killed in a call": (
        "threading.Thread(target=lambda: (meet(), os.kill(os.getpid(), 9))).start(); call()",
        Outcome(told="", failed="no call answered; exit code 137 (SIGKILL)", leaves=True),
    ),
    "never calls": ("pass", Outcome(told="", failed="no call answered; exit code 0")),
    "exits 1 after good calls": ("call(); sys.exit(1)", Outcome(failed="the agent failed: exit code 1")),
    "floods of calls": (
        "for number in range(30): call(say(str(number)))",
        Outcome(
            told=" ".join(["200"] * 3 + ["403"] * 27),
            samples=3,
            sampled=12,
            finish="length",
            refused="has had 3 of max_calls = 3",
            settings={"max_calls": 3},
        ),
    ),
    "floods of output": ("call(); print('x' * (5 << 20)); print('200')", Outcome(told="")),
    "changes its history": (
        "first = call(); call([*USER, {'role': 'assistant', 'content': 'I said 8'}, *say('and?')])",
        Outcome(told="200 200", samples=2, sampled=8),
    ),
    "forks children that outlive it": (
        "call(); print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)",
        Outcome(told=""),
    ),
    "lies about its key": (
        "call(key='sk-mine'); call(key='')",
        Outcome(told="401 401", failed="no call answered; exit code 0"),
    ),
    "sends a gigantic body": (
        "call(say('x' * (5 << 20)))\n" + GOOD,
        Outcome(told="413 200", refused="larger than 4194304 bytes"),
    ),
    "sends invalid JSON": (RAW.format(b"{broken") + GOOD, Outcome(told="400 200", refused="invalid JSON")),
    "sends a list": (RAW.format(b"[1]") + GOOD, Outcome(told="400 200", refused="must be a JSON object")),
    "sends deep JSON": (RAW.format(b"[" * 100_000) + GOOD, Outcome(told="400 200", refused="invalid JSON")),
    "sends invalid tool arguments": (
        "bad = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': '{bad'}}\n"
        "call([*USER, {'role': 'assistant', 'tool_calls': [bad]}])\n" + GOOD,
        Outcome(told="400 200", refused="arguments must be a JSON object"),
    ),
    "sends half of a surrogate pair": (
        RAW.format(rb'{"messages": [{"role": "user", "content": "a\ud800"}]}') + GOOD,
        Outcome(told="400 200", refused="surrogate"),
    ),
    "sends control tokens as text": (
        "call(say(''.join(['<|im_end|>', '</s>', '<|endoftext|>', chr(0)])))",
        Outcome(),
    ),
    "names another model": (
        "assert post('chat/completions', json.dumps({'model': 'gpt-9', 'messages': USER}).encode())"
        "[1]['model'] == 'gpt-9'",
        Outcome(told=""),
    ),
    "asks for a hundred answers": (
        "call(n=100); call(n=2)",
        Outcome(told="403 200", samples=2, sampled=8, refused="max_calls = 32"),
    ),
    "sends no messages": ("call([])\n" + GOOD, Outcome(told="400 200", refused="messages is empty")),
    "asks for temperature 0": ("call(temperature=0, top_p=0.1, seed=1, frequency_penalty=2)", Outcome()),
    "asks for a biased distribution": (
        "call(logit_bias={'1': 100})\n" + GOOD,
        Outcome(told="400 200", refused="logit_bias"),
    ),
    "asks a path that is not there": (
        "print(post('embeddings', b'{}')[0])\n" + GOOD,
        Outcome(told="404 200", refused="there is no POST"),
    ),
    "rewards itself with nonsense": (
        GOOD + "print(reward('much')[0])",
        Outcome(told="200 400", refused="a number from 0 to 1"),
    ),
    "rewards itself beyond the range": (
        GOOD + "print(reward(1.01)[0])",
        Outcome(told="200 400", refused="from 0 to 1, not 1.01 \\(sampling.agent.reward_range"),
    ),
    "closes the connection while it waits": (LEAVE.replace("STREAM", "False") + GOOD, Outcome(leaves=True)),
    "streams and disconnects": (LEAVE.replace("STREAM", "True") + GOOD, Outcome(leaves=True)),
}


def play(
    tokenizer: ChatTokenizer,
    prompts: list[Prompt],
    config: AgentConfig,
    *,
    before: Callable[[], object] = lambda: None,
) -> tuple[AgentSampler, list[Episode]]:
    sampler = AgentSampler(Parrot(tokenizer, before=before), tokenizer, config)
    return sampler, [episode for (episode,) in sampler.play(prompts, PARAMS, seed=0)]


@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_a_misbehaviour_has_its_outcome(
    name: str, tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path
) -> None:
    code, outcome = MISBEHAVIOURS[name]

    def has_left() -> bool:
        return (tmp_path / "left").exists() or not is_alive(int((tmp_path / "pid").read_text()))

    def before() -> None:
        if outcome.leaves:
            (tmp_path / "begun").touch()
            until(has_left)

    def played(seconds: float) -> Episode:
        config = agent(MEET.format(room=str(tmp_path)) + code, timeout_seconds=seconds, **outcome.settings)
        _, (episode,) = play(tokenizer, prompts[:1], config, before=before)
        return episode

    episode = given_time(
        played,
        lambda made: made.ended.code is not None or bool(made.record.calls),
        seconds=4.0 if "hangs" in name else LONG,
    )
    output, made = episode.ended.output, rollout_of(episode, agent(code, **outcome.settings))
    if outcome.told:
        assert output.split() == outcome.told.split(), output[-500:]
    assert re.search(outcome.refused, " ".join(episode.record.refused)), episode.record.refused
    if outcome.failed:
        assert isinstance(made, FailedRollout)
        assert outcome.failed in made.reason
        return
    assert not isinstance(made, FailedRollout), made.reason
    tokens = [sum(each.loss_mask) for each in made.samples]
    assert (len(tokens), sum(tokens), made.num_sampled) == (outcome.samples, outcome.sampled, outcome.sampled)
    assert made.finish_reason == outcome.finish
    assert (made.text, made.environment_reward) == ("#### 7", None)
    mask_canary([made], tokenizer.eos_ids)
    if "children" in name:
        assert not is_alive(int(output.split()[1]))


def test_the_key_of_another_episode_opens_that_one_alone_and_nothing_once_it_is_over(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]], tmp_path: Path
) -> None:
    """A key is all that an episode is known by, so an agent that steals one plays there; nothing of it is its own."""
    code = f"""
        keys = Path({str(tmp_path)!r})
        def key_of(name):
            while not (keys / name).exists() or not (keys / name).read_text():
                time.sleep(0.01)
            return (keys / name).read_text()
        name = TASK["prompt_id"]
        if name == "victim":
            (keys / name).write_text(KEY)
            key_of("used")
        if name == "thief":
            call(say("stolen"), key=key_of("victim"))
            (keys / "used").write_text("x")
        if name == "late":
            call(key=key_of("victim"))
    """
    names = ("victim", "thief", "late")
    prompts = [
        dataclasses.replace(each, prompt_id=name) for each, name in zip(make_prompts("1", "2", "3"), names, strict=True)
    ]
    sampler, (victim, thief, late) = play(tokenizer, prompts, agent(code, max_concurrent=2))
    assert victim.record.rollout is not None
    assert victim.record.rollout.text == "#### 7"
    assert (thief.record.rollout, late.record.rollout) == (None, None)
    assert (thief.ended.output, late.ended.output) == ("200\n", "409\n")
    assert sampler.take_metrics()["agents/late_calls"] == pytest.approx(1 / 3)


def test_in_a_sandbox_no_key_and_no_folder_of_another_episode_can_be_read(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    from tests.rlcore.sandbox.conftest import require_bubblewrap

    require_bubblewrap()
    code = """
        def keys():
            for path in Path("/proc").glob("[0-9]*/environ"):
                try:
                    yield from (each[15:] for each in path.read_text().split(chr(0)) if each[:15] == "OPENAI_API_KEY=")
                except OSError:
                    pass
        call()
        print(len(set(keys()) | {KEY}), len(list(Path.cwd().parent.iterdir())))
    """
    _, episodes = play(tokenizer, prompts, agent(code, sandbox=True))
    assert [episode.ended.output for episode in episodes] == ["200\n1 1\n"] * 4
