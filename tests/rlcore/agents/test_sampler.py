"""Episodes of agents as rollouts: what is kept of them, what a crash makes of them, and what ends with an error."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.agents import sampler as samplers
from rlcore.agents.gateway import Gateway
from rlcore.agents.sampler import AgentSampler, rollout_of
from rlcore.agents.session import Asked, Session
from rlcore.checks.canaries.masks import mask_canary
from rlcore.config import AgentConfig
from rlcore.errors import DataError, SamplingError
from rlcore.metrics import find_metric
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.programs import Play, agent
from tests.waiting import LONG, given_time, is_alive, until, until_ended

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=100, num_samples=1)
TWO_TURNS = """
    first = call()
    call([*USER, first, *say(first["content"].upper())])
"""
FORKS = 'first = call(); call([*USER, first, *say("a")]); call([*USER, first, *say("b")])'


def sample(
    engine: Parrot, tokenizer: ChatTokenizer, prompts: list[Prompt], config: AgentConfig, count: int = 1
) -> list[list[Rollout | FailedRollout]]:
    params = dataclasses.replace(PARAMS, num_samples=count)
    return AgentSampler(engine, tokenizer, config).sample(prompts, params, seed=0)


def made_of(play: Play, code: str, **settings: Any) -> Rollout | FailedRollout:
    return rollout_of(
        play(code, **settings), agent(code, **{each: settings[each] for each in settings if each != "before"})
    )


def rollout(made: Rollout | FailedRollout) -> Rollout:
    assert isinstance(made, Rollout), made
    return made


def test_an_unchanged_program_plays_the_episodes_of_a_group(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    engine = Parrot(tokenizer, lambda text: f"saw {len(text)}")
    groups = sample(engine, tokenizer, prompts, agent(TWO_TURNS), count=2)
    assert [[made.prompt.prompt_id for made in group] for group in groups] == [[each.prompt_id] * 2 for each in prompts]
    for group, prompt in zip(groups, prompts, strict=True):
        for made in map(rollout, group):
            assert made.prompt.token_ids == prompt.token_ids
            assert made.prompt.messages == prompt.messages
            assert (made.branches, made.policy_version, made.finish_reason) == ((), 3, "stop")
            assert len(made.turns) == 2
            assert made.num_sampled == sum(made.loss_mask) < len(made.loss_mask)
            spoken = tokenizer.decode(made.completion_ids)
            first = f"saw {len(tokenizer.decode(prompt.token_ids))}"
            assert spoken.startswith(first) and first.upper() in spoken and spoken.endswith(made.text)
    assert sum(engine.batches) == 16


def test_the_run_decides_temperature_and_limits_and_the_engine_is_the_one_behind(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    engine = Parrot(tokenizer)
    sampler = AgentSampler(engine, tokenizer, agent("call(temperature=0.0, max_tokens=2, top_p=0.1)"))
    ((made,),) = sampler.sample(prompts[:1], PARAMS, seed=0)
    assert {(each.temperature, each.greedy) for each in engine.params} == {(0.7, False)}
    assert (len(rollout(made).completion_ids), rollout(made).finish_reason) == (2, "length")
    assert sampler.policy_version == 3
    assert sampler.differing_parts({}) is None
    sampler.load_weights({}, policy_version=4)
    assert engine.policy_version == 4


def test_an_agent_may_reward_its_episode(play: Play) -> None:
    assert rollout(made_of(play, "call(); reward('x'); reward(0.25)")).environment_reward == 0.25


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("call(); reward(1.0); print('oh no'); sys.exit(1)", "the agent failed: exit code 1; last output: oh no"),
        (
            "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; call(); time.sleep(600)",
            "the agent failed: timed out after [\\d.]+ s; last output: 200",
        ),
    ],
)
def test_an_agent_that_fails_after_good_calls_is_unscored_or_has_an_empty_answer(
    play: Play, code: str, reason: str
) -> None:
    made = given_time(
        lambda seconds: made_of(play, code, timeout_seconds=seconds),
        lambda made: isinstance(made, FailedRollout) and bool(re.fullmatch(reason, made.reason)),
        seconds=0.5,
    )
    assert isinstance(made, FailedRollout) and re.fullmatch(reason, made.reason)
    zero = rollout(
        given_time(
            lambda seconds: made_of(play, code, timeout_seconds=seconds, on_crash="zero"),
            lambda made: isinstance(made, Rollout),
            seconds=0.5,
        )
    )
    assert (zero.text, zero.environment_reward, zero.num_sampled) == ("", 0.0, sum(zero.loss_mask))


def test_without_an_answered_call_nothing_can_be_trained(play: Play) -> None:
    for code, end in (("pass", "exit code 0"), ("1 / 0", "exit code 1; last output: ZeroDivisionError")):
        made = made_of(play, code, on_crash="zero")
        assert isinstance(made, FailedRollout)
        assert made.reason.startswith(f"the agent had no call answered; {end}")


def test_an_agent_that_breaks_at_a_limit_is_truncated_and_no_crash(play: Play) -> None:
    made = rollout(made_of(play, "for _ in range(3): call([*USER, *say('x')])\nassert 0", max_calls=2))
    assert (made.finish_reason, made.text) == ("length", "#### 7")
    made = rollout(made_of(play, "call()\nassert '#' in call(say('long ' * 100))", max_prompt_tokens=40))
    assert (made.finish_reason, made.text) == ("length", "#### 7")


def test_branches_are_trained_dropped_or_refused(play: Play) -> None:
    episode = play(FORKS)
    trained, main = (rollout(rollout_of(episode, agent("", branches=each))) for each in ("train", "main"))
    assert len(trained.samples) == 2
    assert trained.num_sampled == sum(sum(each.loss_mask) for each in trained.samples)
    assert (main.completion_ids, main.branches) == (trained.completion_ids, ())
    assert main.num_sampled == sum(main.loss_mask)
    refused = rollout_of(episode, agent("", branches="refuse"))
    assert isinstance(refused, FailedRollout)
    assert refused.reason.startswith("the episode has 2 samples: ")
    assert "branches = 'refuse'" in refused.reason


def test_more_than_one_and_a_tenth_of_failed_agents_end_the_run(
    play: Play, tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = play("call()"), play("call(); sys.exit(1)")

    def made(*, failed: int, fine: int, **settings: Any) -> list[list[Rollout | FailedRollout]]:
        monkeypatch.setattr(AgentSampler, "play", lambda *_, **__: [[bad]] * failed + [[good]] * fine)
        return sample(Parrot(tokenizer), tokenizer, prompts, agent("", **settings))

    for failed, fine in ((1, 2), (2, 18)):
        found = made(failed=failed, fine=fine)
        assert [isinstance(each, FailedRollout) for (each,) in found] == [True] * failed + [False] * fine
    with pytest.raises(SamplingError, match=r"agents failed in 3 of 20 episodes \(limit 10%\): the agent failed"):
        made(failed=3, fine=17)
    assert all(isinstance(each, Rollout) for (each,) in made(failed=3, fine=17, on_crash="zero"))


def test_no_more_agents_run_than_allowed(tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path) -> None:
    code = f"""
        mine = Path({str(tmp_path)!r}, str(os.getpid()))
        mine.touch()
        print(len(list(mine.parent.iterdir())))
        call()
        mine.unlink()
    """
    config = agent(code, max_concurrent=2)
    groups = AgentSampler(Parrot(tokenizer), tokenizer, config).play(
        prompts, dataclasses.replace(PARAMS, num_samples=2), seed=0
    )
    counts = [int(episode.ended.output.split()[0]) for group in groups for episode in group]
    assert len(counts) == 8
    assert max(counts) <= 2


WAITING = """
    child = subprocess.Popen(['sleep', '600'], start_new_session=True)
    Path({!r}, f'{{os.getpid()}}-{{child.pid}}').touch()
    call()
"""


@pytest.mark.parametrize("error", [SamplingError("the engine broke"), KeyboardInterrupt()])
def test_if_the_engine_fails_or_the_run_is_interrupted_in_a_call_no_agent_is_left(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path, error: BaseException
) -> None:
    def fail() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 4)
        raise error

    engine = Parrot(tokenizer, before=fail)
    with pytest.raises(type(error)):
        sample(engine, tokenizer, prompts, agent(WAITING.format(str(tmp_path))))
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.name.split("-")]
    assert len(pids) == 8
    until_ended(pids)


def test_an_episode_that_cannot_be_played_ends_the_batch_at_once(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.write_text("x")
    code = f"call(); Path({str(data)!r}).unlink(missing_ok=True); time.sleep(600 * (TASK['prompt_id'] != '1'))"
    config = agent(code, files=(str(data),), max_concurrent=3)
    with pytest.raises(DataError, match="a file of the agent cannot be copied: No such file or directory"):
        sample(Parrot(tokenizer), tokenizer, prompts, config)


def test_the_death_of_the_gateway_is_no_crash_of_agents(
    tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Gateway] = []

    class Mortal(Gateway):
        def __enter__(self) -> Gateway:
            made.append(self)
            return super().__enter__()

    monkeypatch.setattr(samplers, "Gateway", Mortal)
    engine = Parrot(tokenizer, before=lambda: threading.Thread(target=made[0]._server.stop).start())
    with pytest.raises(SamplingError, match="gateway"):
        sample(engine, tokenizer, prompts, agent("call(); time.sleep(600)", timeout_seconds=LONG))


@pytest.mark.parametrize("after", ["sys.exit(1)", "pass"])
def test_an_unexpected_exception_fails_the_episode_that_meets_it_and_ends_the_run_if_all_do(
    tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    answer = Gateway._reply

    def broken(self: Gateway, session: Session, asked: Asked) -> object:
        if f"{session.prompt.prompt_id}/{session.sample}" in are_broken:
            raise ZeroDivisionError("planted")
        return answer(self, session, asked)

    monkeypatch.setattr(Gateway, "_reply", broken)
    program = agent(f"if 'error' in call(): {after}")
    prompts = prompts[:2]
    names = {f"{prompt.prompt_id}/0" for prompt in prompts}
    are_broken = {min(names)}
    made = [each for group in sample(Parrot(tokenizer), tokenizer, prompts, program) for each in group]
    assert sum(isinstance(each, FailedRollout) and "planted" in each.reason for each in made) == 1
    are_broken = names
    with pytest.raises(SamplingError, match=r"agents failed in .*internal error of the gateway: .*planted"):
        sample(Parrot(tokenizer), tokenizer, prompts, program)


def test_the_figures_of_agents_are_those_worked_by_hand(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    # A refused call and a reward each, and 1 of 4 fails.
    code = "call(); call(n=0.5); sys.exit(reward(1)[0] != 200 or TASK['prompt_id'] == '1')"
    sampler = AgentSampler(Parrot(tokenizer), tokenizer, agent(code))
    assert sampler.take_metrics() == {}
    sampler.play(prompts, dataclasses.replace(PARAMS, greedy=True), seed=0)
    assert sampler.take_metrics() == {}  # of an evaluation
    sampler.play(prompts, PARAMS, seed=0)
    found = sampler.take_metrics()
    assert sampler.take_metrics() == {}
    assert [name for name in found if find_metric(name) is None] == []
    overhead, shared = found.pop("agents/overhead_seconds"), found.pop("agents/requests_per_engine_call")
    assert 0.0 < overhead < LONG
    assert 1.0 <= shared <= 4.0
    assert found == {
        "agents/calls": 1.0,
        "agents/failed": 0.25,
        "agents/timed_out": 0.0,
        "agents/own_rewards": 1.0,
        "agents/late_calls": 0.0,
        "agents/refused_calls": 1.0,
        "agents/retried_calls": 0.0,
        "agents/unparsed_calls": 0.0,
        "agents/cut_answers": 0.0,
    }


def test_the_text_of_a_reason_is_one_line(play: Play) -> None:
    made = made_of(play, r"call(); print('a\x1b[31m' * 500, end='\n\n'); sys.exit(1)")
    assert isinstance(made, FailedRollout)
    assert re.fullmatch(r"the agent failed: exit code 1; last output: [ -~…]{300,600}", made.reason)


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


@pytest.mark.parametrize(
    ("code", "is_kept"),
    [
        ("threading.Thread(target=lambda: (meet(), os.kill(os.getpid(), 9))).start(); call()", False),
        (LEAVE.replace("STREAM", "False") + "call()\n", True),
        (LEAVE.replace("STREAM", "True") + "call()\n", True),
    ],
    ids=["is killed", "closes the connection", "closes a stream"],
)
def test_an_agent_that_leaves_in_a_call_keeps_the_calls_that_it_read(
    play: Play, tokenizer: ChatTokenizer, tmp_path: Path, code: str, is_kept: bool
) -> None:
    def until_it_left() -> None:
        (tmp_path / "begun").touch()
        until(lambda: (tmp_path / "left").exists() or not is_alive(int((tmp_path / "pid").read_text())))

    made = made_of(play, MEET.format(room=str(tmp_path)) + code, before=until_it_left, timeout_seconds=LONG)
    if not is_kept:
        assert isinstance(made, FailedRollout) and "no call answered; exit code 137 (SIGKILL)" in made.reason
        return
    assert (rollout(made).text, rollout(made).num_sampled, sum(rollout(made).loss_mask)) == ("#### 7", 4, 4)
    mask_canary([rollout(made)], tokenizer.eos_ids)


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
    sampler = AgentSampler(Parrot(tokenizer), tokenizer, agent(code, max_concurrent=2))
    (victim,), (thief,), (late,) = sampler.play(prompts, PARAMS, seed=0)
    assert victim.record.rollout is not None
    assert victim.record.rollout.text == "#### 7"
    assert (thief.record.rollout, late.record.rollout) == (None, None)
    assert (thief.ended.output, late.ended.output) == ("200\n", "409\n")
    assert sampler.take_metrics()["agents/late_calls"] == pytest.approx(1 / 3)
