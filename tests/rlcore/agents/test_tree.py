"""An episode as text: calls with tokens, forks with their reasons, and what is wrong in plain words."""

from __future__ import annotations

import dataclasses
import re

import pytest

from rlcore.agents.tree import advice, episode_lines
from tests.rlcore.agents.programs import Play
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import given_time


def test_calls_are_shown_with_tokens_and_a_fork_with_its_reason(play: Play) -> None:
    code = "first = call(); call([*USER, first, *say('a')]); call([*USER, first, *say('b')])"
    episode = play(code)
    head, first, second, reason, third = episode_lines(episode, result="reward 1.000")
    assert head == "p-1: reward 1.000; calls=3 samples=2"
    assert re.fullmatch(r"  1 chat +11 prompt tokens +4 sampled +\d+\.\d\d s  '#### 7'", first)
    assert re.fullmatch(r"  2 chat +\d\d prompt tokens +4 sampled +\d+\.\d\d s  '#### 7'", second)
    assert reason.startswith("    new sample: ")
    assert re.fullmatch(r"    3 chat .*", third)
    (forks,) = advice([episode])
    assert forks.startswith("2 samples for 1 episodes: each costs a forward pass of its whole history. ")


def test_a_control_character_of_an_answer_is_escaped_once(play: Play) -> None:
    episode = play("call()")
    call = dataclasses.replace(episode.record.calls[0], text="a\x06b'c")
    episode = dataclasses.replace(episode, record=dataclasses.replace(episode.record, calls=(call,)))
    assert episode_lines(episode, result="")[1].endswith("  'a\\x06b'c'")


def test_an_agent_that_fails_is_shown_with_its_last_lines_and_what_it_was_told(play: Play) -> None:
    episode = play("call([]); print('one'); 1 / 0")
    lines = episode_lines(episode, result="no score")
    assert lines[:3] == [
        "p-1: no score; calls=0 samples=0",
        "  refused: messages is empty",
        "  the agent failed: exit code 1; last output: ZeroDivisionError: division by zero",
    ]
    assert lines[-1] == "  | ZeroDivisionError: division by zero"
    silent, refused = advice([episode])
    assert silent == "1 of 1 agents had no call answered: see the end of their output"
    assert refused == "1 calls were refused, most often: messages is empty"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", "must call OPENAI_BASE_URL"),
        ("call(max_tokens=2)", "1 answers were cut at a limit"),
        ("call(); time.sleep(600)", "did not end in time"),
    ],
)
def test_advice_names_what_to_change(play: Play, code: str, words: str) -> None:
    episode = given_time(
        lambda seconds: play(code, timeout_seconds=seconds),
        lambda played: played.ended.code is not None or bool(played.record.calls),
        seconds=4.0,
    )
    assert any(words in line for line in advice([episode]))


def test_a_sound_episode_needs_no_advice(play: Play) -> None:
    assert list(advice([play("call()")])) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such", "(ModuleNotFoundError: No module named 'no_such'): add the module to files"),
        ("open('/srv/no_such')", "No such file or directory: '/srv/no_such'): add the file to files, or its path"),
        (
            "socket.create_connection(('198.51.100.1', 80))",
            "Network is unreachable): there is no network but the gateway",
        ),
        ("open('/usr/x', 'w')", "Read-only file system: '/usr/x'): write in the current folder"),
    ],
)
def test_what_an_agent_misses_in_the_sandbox_is_named(play: Play, code: str, words: str) -> None:
    require_bubblewrap()
    episode = play(f"call(); {code}", sandbox=True)
    (line,) = advice([episode], is_boxed=True)
    assert line.startswith("1 agents miss something in the sandbox (") and words in line
