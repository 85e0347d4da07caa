"""The tree of calls: what counts as the same history, the words for what does not, and an episode as text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlcore.agents.gateway import Gateway
from rlcore.agents.session import Session
from rlcore.agents.tree import advice, episode_lines
from rlcore.errors import ModelError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.gateways import (
    ADD,
    CALL,
    LIMITS,
    RESPONSE_TEMPLATE,
    Episode,
    Reply,
    ask,
    chat,
    message_of,
    running,
    scripted,
    user,
    with_response_template,
)
from tests.rlcore.agents.programs import Play
from tests.rlcore.environments.tool_templates import HERMES, with_template
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import given_time

Change = Callable[[dict[str, Any]], dict[str, Any]]


def tool(content: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@pytest.fixture(scope="module")
def hermes(tokenizer: ChatTokenizer) -> ChatTokenizer:
    return with_template(tokenizer, HERMES)


@pytest.fixture(scope="module")
def adding(hermes: ChatTokenizer) -> Iterator[Gateway]:
    """A gateway whose model calls a tool, and reads its output."""
    turns = (f"<think>Add them.</think>\n{CALL}", "It is 7.")
    engine = Parrot(hermes, lambda text: turns["tool_response" in text])
    with running(engine, hermes) as gateway:
        yield gateway


def _arguments(message: dict[str, Any], arguments: str) -> dict[str, Any]:
    (call,) = message["tool_calls"]
    return message | {"tool_calls": [call | {"function": call["function"] | {"arguments": arguments}}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message,
        lambda message: _arguments(message, '{"b":4,  "a": 3}'),
        lambda message: message | {"content": ""},
        lambda message: {key: value for key, value in message.items() if key not in ("content", "reasoning_content")},
        lambda message: message | {"content": [{"type": "text", "text": " "}]},
        lambda message: message | {"content": "<think>Add them.</think>"},
        lambda message: message | {"tool_calls": [message["tool_calls"][0] | {"id": "another"}]},
    ],
    ids=["unchanged", "arguments", "empty", "absent", "parts", "thought", "id"],
)
def test_the_same_history_in_other_words_extends_the_recorded_tokens(
    adding: Gateway, hermes: ChatTokenizer, prompts: list[Prompt], change: Change
) -> None:
    session = adding.open(prompts[0], place=0, sample=0)
    first = message_of(chat(adding, session, user("3+4"), tools=[ADD]))
    assert first["reasoning_content"] == "Add them." and first["content"] is None
    seen = change(first)
    answer = tool("7", seen["tool_calls"][0]["id"])
    message_of(chat(adding, session, user([{"type": "text", "text": "3+4"}]), seen, answer, tools=[ADD]))
    rollout = adding.close(session).rollout
    assert rollout is not None and rollout.branches == () and len(rollout.turns) == 2
    assert [(call.tool, call.output) for call in rollout.tool_calls] == [("add", "7")]
    text = hermes.spell([*rollout.prompt.token_ids, *rollout.completion_ids])
    assert text.count("Tools:") == 1 and "<tool_response>\n7\n</tool_response>" in text


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([user("3+4")], "the same request again"),
        ([user("Title?")], "another conversation"),
        (
            [user("3+4"), {"role": "assistant", "content": "8"}, user("more")],
            "message 2 differs: assistant '8' instead of assistant '7'",
        ),
    ],
)
def test_a_fork_has_its_reason(episode: Episode, second: list[dict[str, Any]], reason: str) -> None:
    with episode("7", "8") as (gateway, session):
        message_of(chat(gateway, session, user("3+4")))
        message_of(chat(gateway, session, *second))
        record = gateway.close(session)
    assert [call.fork for call in record.calls] == ["", reason]
    assert record.rollout is not None and record.rollout.text == "8"
    assert [(branch.text, branch.fork) for branch in record.rollout.branches] == [("7", reason)]


def conversation(gateway: Gateway, session: Session) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two turns of one conversation: the messages after the first answer, and after the second."""
    first = [user("3+4"), message_of(chat(gateway, session, user("3+4")))]
    second = [*first, user("more"), message_of(chat(gateway, session, *first, user("more")))]
    return first, second


def test_a_fork_in_the_middle_shares_the_answer_before_and_trains_it_once(episode: Episode) -> None:
    with episode("7", "8", "9", "10") as (gateway, session):
        first, second = conversation(gateway, session)
        message_of(chat(gateway, session, *first, user("less")))
        message_of(chat(gateway, session, *second, user("end")))
        record = gateway.close(session)
    assert [(call.parent, call.fork) for call in record.calls] == [
        (None, ""),
        (1, ""),
        (1, "message 3 differs: user 'less' instead of user 'more'"),
        (2, ""),
    ]
    rollout = record.rollout
    assert rollout is not None and rollout.text == "10" and len(rollout.turns) == 3
    sent = [(call.text, call.tool, call.output) for call in rollout.tool_calls]
    assert sent == [("7", "", "more"), ("8", "", "end")]  # turns without a call, and what the agent sent after each
    (branch,) = rollout.branches
    assert branch.text == "9" and len(branch.turns) == 1 and branch.prompt.token_ids == rollout.prompt.token_ids
    shared = branch.turns[0][0]  # the first answer is read in the branch, and trained in the episode
    assert branch.completion_ids[:2] == rollout.completion_ids[:2] and rollout.loss_mask[0]
    assert not any(branch.loss_mask[:shared]) and not any(branch.sampler_logprobs[:shared])


def test_several_answers_are_branches_and_the_continued_one_is_the_episode(episode: Episode) -> None:
    with episode("6", "7", "8", "done") as (gateway, session):
        reply = chat(gateway, session, user("3+4"), n=3)
        message_of(chat(gateway, session, user("3+4"), message_of(reply, 1), user("sure?")))
        record = gateway.close(session)
    assert record.rollout is not None and record.rollout.text == "done"
    assert [(each.text, each.fork) for each in record.rollout.branches] == [
        ("6", "answer 2 of n = 3"),
        ("8", "answer 3 of n = 3"),
    ]
    assert [call.parent for call in record.calls] == [None, None, None, 2]


def test_of_several_last_answers_the_first_is_the_episodes(episode: Episode) -> None:
    with episode("6", "7") as (gateway, session):
        message_of(chat(gateway, session, user("3+4"), n=2))
        rollout = gateway.close(session).rollout
    assert rollout is not None and [each.text for each in rollout.samples] == ["6", "7"]


def test_a_stop_string_ends_the_sample_and_the_template_ends_the_turn(
    episode: Episode, tokenizer: ChatTokenizer
) -> None:
    def answered(*messages: dict[str, Any]) -> dict[str, Any]:
        return message_of(chat(gateway, session, *messages, stop=["</code>", "END"]))

    with episode("<code>3</code> more", "<code>4</code>", "done") as (gateway, session):
        first = answered(user("3+4"))
        second = answered(user("3+4"), first, user("a"))
        answered(user("3+4"), first, user("a"), second, user("b"))
        rollout = gateway.close(session).rollout
    assert (first["content"], second["content"]) == ("<code>3", "<code>4")
    assert rollout is not None and rollout.branches == () and len(rollout.turns) == 3
    assert [call.text for call in rollout.tool_calls] == ["<code>3", "<code>4"]
    own = [tokenizer.spell(rollout.completion_ids[start:end]) for start, end in rollout.turns]
    assert own == ["<code>3</code>", "<code>4</code>", "done<|im_end|>"]
    assert rollout.num_sampled == sum(rollout.loss_mask)
    assert "3</code><|im_end|>\n<|im_start|>user\na<|im_end|>" in tokenizer.spell(rollout.completion_ids)


@pytest.mark.parametrize(
    ("tools", "reason"), [([], "the tools were changed"), ([ADD, ADD], "the tools were changed"), ([ADD], "")]
)
def test_other_tools_are_another_prompt(episode: Episode, hermes: ChatTokenizer, tools: list[Any], reason: str) -> None:
    with episode("7", "8", own=hermes) as (gateway, session):
        first = message_of(chat(gateway, session, user("3+4"), tools=[ADD]))
        message_of(chat(gateway, session, user("3+4"), first, user("more"), tools=tools, tool_choice="none"))
        record = gateway.close(session)
    assert [call.fork for call in record.calls] == ["", reason]


def test_dropped_messages_and_continuations_have_their_words(episode: Episode) -> None:
    with episode("7", "8", "9", "10") as (gateway, session):
        _, second = conversation(gateway, session)
        message_of(chat(gateway, session, user("3+4"), second[1], user("more"), second[3], user("end")))
        message_of(chat(gateway, session, *second[:2], user("more"), user("end")))
        record = gateway.close(session)
    assert [call.fork for call in record.calls][2:] == ["", "message 4 differs: user 'end' instead of assistant '8'"]


def test_the_tail_has_the_tokens_of_the_template_for_any_messages(episode: Episode, hermes: ChatTokenizer) -> None:
    """Two tool outputs in a row, a user after them, and a system message in the middle."""
    two = CALL + "\n" + CALL.replace("4", "5")
    with episode(two, "7 and 8.", own=hermes) as (gateway, session):
        first = message_of(chat(gateway, session, user("3+4"), tools=[ADD]))
        ids = [call["id"] for call in first["tool_calls"]]
        assert [json.loads(call["function"]["arguments"])["b"] for call in first["tool_calls"]] == [4, 5]
        rest = [tool("7", ids[0]), tool("8<|im_end|>", ids[1]), {"role": "system", "content": "Be brief."}, user("So?")]
        message_of(chat(gateway, session, user("3+4"), first, *rest, tools=[ADD]))
        rollout = gateway.close(session).rollout
    assert rollout is not None
    start = rollout.turns[0][1]
    tail = hermes.spell(rollout.completion_ids[start : rollout.turns[1][0]])
    end = "<|im_end|>\n"
    assert tail == (
        f"\n<|im_start|>user\n<tool_response>\n7\n</tool_response>{end}<|im_start|>user\n<tool_response>\n8<|im_end|>\n"
        f"</tool_response>{end}<|im_start|>system\nBe brief.{end}<|im_start|>user\nSo?{end}<|im_start|>assistant\n"
    )
    assert sum(number in hermes.eos_ids for number in rollout.completion_ids) == 2 + 4  # not the one of the tool


def test_a_stored_response_is_continued_by_its_id(episode: Episode, hermes: ChatTokenizer) -> None:
    def respond(**fields: Any) -> Reply:
        body = {"model": "any", "tools": [{"type": "function"} | ADD["function"]], **fields}
        return ask(gateway, session, "/v1/responses", body)

    with episode(CALL, "It is 7.", "8", own=hermes) as (gateway, session):
        first = respond(input="3+4", instructions="Be brief.").body
        output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "7"}
        second = respond(input=[output], instructions="Be brief.", previous_response_id=first["id"]).body
        third = respond(
            input=[*({"type": "item_reference", "id": each["id"]} for each in first["output"]), output],
            instructions="Be long.",
        )
        unknown = respond(input="x", previous_response_id="resp_of_another")
        record = gateway.close(session)
    assert (second["output"][0]["content"][0]["text"], second["instructions"]) == ("It is 7.", "Be brief.")
    assert (unknown.status, unknown.code) == (400, "previous_response_not_found") and third.status == 200
    assert [(call.kind, call.parent) for call in record.calls] == [("responses", parent) for parent in (None, 1, None)]


def test_a_template_that_moves_earlier_text_begins_a_new_sample(episode: Episode, tokenizer: ChatTokenizer) -> None:
    moving = with_template(
        tokenizer,
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% if loop.index == ns.last %}Tools.\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    with episode("7", "8", own=moving) as (gateway, session):
        conversation(gateway, session)
        record = gateway.close(session)
    assert record.calls[1].fork == "the chat template writes the earlier messages differently now"
    assert record.rollout is not None and len(record.rollout.samples) == 2


def test_a_tokenizer_with_a_response_template_reads_calls_by_it(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    own = with_response_template(tokenizer)
    call = CALL.replace("tool_call>", "call>")
    with running(scripted(own, "3+4", [f"<think>Add.</think>I add.{call}", call[:-9], "7"]), own) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)
        first = message_of(chat(gateway, session, user("3+4"), tools=[ADD]))
        assert (first["reasoning_content"], first["content"]) == ("Add.", "I add.")
        assert [json.loads(each["function"]["arguments"]) for each in first["tool_calls"]] == [{"a": 3, "b": 4}]
        output = tool("7", first["tool_calls"][0]["id"])
        second = message_of(chat(gateway, session, user("3+4"), first, output, tools=[ADD]))
        assert second["content"] == call[:-9] and gateway.statistics["unparsed_calls"] == 1
        rollout = gateway.close(session).rollout
    assert rollout is not None and rollout.branches == ()


def test_a_response_template_that_fails_on_every_answer_is_refused(tokenizer: ChatTokenizer) -> None:
    own = with_response_template(tokenizer)
    own.hf_tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": {"content": {"content": "json"}}}
    with pytest.raises(ModelError, match="response template fails on a plain answer"):
        Gateway(scripted(own, "3+4", ["7"]), own, LIMITS, temperature=1.0, seed=0)


def test_calls_are_shown_with_tokens_and_a_fork_with_its_reason(play: Play) -> None:
    code = "first = call(); call([*USER, first, *say('a')]); call([*USER, first, *say('b')])"
    episode = play(code)
    head, first, second, reason, third = episode_lines(episode, result="reward 1.000")
    assert head == "p-1: reward 1.000; calls=3 samples=2"
    assert re.fullmatch(r"  1 chat +11 prompt tokens +4 sampled +\d+\.\d\d s  '#### 7'", first)
    assert re.fullmatch(r"  2 chat +\d\d prompt tokens +4 sampled +\d+\.\d\d s  '#### 7'", second)
    assert reason.startswith("    new sample: ")
    assert re.fullmatch(r"    3 chat .*", third)
    assert list(advice([play("call()")])) == []
    (forks,) = advice([episode])
    assert forks.startswith("2 samples for 1 episodes: each costs a forward pass of its whole history. ")


def test_a_control_character_of_an_answer_is_escaped_once(play: Play) -> None:
    episode = play("call()")
    call = dataclasses.replace(episode.record.calls[0], text="a\x06b'c")
    episode = dataclasses.replace(episode, record=dataclasses.replace(episode.record, calls=(call,)))
    assert episode_lines(episode, result="")[1].endswith("  'a\\x06b'c'")


def test_an_agent_that_fails_is_shown_with_its_last_lines_and_refusals(play: Play) -> None:
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
        seconds=0.5,
    )
    assert any(words in line for line in advice([episode]))


MISSING = {
    "import no_such": "(ModuleNotFoundError: No module named 'no_such'): add the module to files",
    "open('/srv/no_such')": "No such file or directory: '/srv/no_such'): add the file to files, or its path",
    "socket.create_connection(('198.51.100.1', 80))": "Network is unreachable): there is no network but the gateway",
    "open('/usr/x', 'w')": "Read-only file system: '/usr/x'): write in the current folder",
}


def test_advice_names_what_an_agent_misses_in_the_sandbox(play: Play) -> None:
    require_bubblewrap()
    tries = f"""
import traceback
call()
for code in {list(MISSING)!r}:
    try: exec(code)
    except Exception: traceback.print_exc()
sys.exit(1)
"""
    for line, words in zip(advice([play(tries, sandbox=True)], is_boxed=True), MISSING.values(), strict=True):
        assert line.startswith("1 agents miss something in the sandbox (") and words in line
