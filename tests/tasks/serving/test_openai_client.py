from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, our_answers
from tests.tasks.serving.conftest import TOKEN, Running
from tests.waiting import LONG


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0, timeout=LONG) as made:
        yield made


def expected_of(running: Running) -> list[str]:
    """The evaluation's greedy answers without the token that ends each: in the toy it has a text."""
    tokenizer = ChatTokenizer.load(running.checkpoint)
    ends = tokenizer.eos_ids
    return [tokenizer.decode(ids[:-1] if ids[-1] in ends else ids) for ids, _ in our_answers(running.checkpoint)]


def test_greedy_answers_are_those_of_the_evaluation(client: openai.OpenAI, running: Running) -> None:
    for question, expected in zip(QUESTIONS, expected_of(running), strict=True):
        found = client.chat.completions.create(
            model="toy", messages=conversation(question), temperature=0, max_tokens=MAX_NEW_TOKENS
        )
        assert found.choices[0].message.content == expected
        assert found.choices[0].message.role == "assistant"
        assert found.usage is not None
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_draws_of_a_seed_are_those_of_the_sampler_of_rollouts(client: openai.OpenAI, running: Running) -> None:
    tokenizer = ChatTokenizer.load(running.checkpoint)
    turns = (Message(role="user", content="3+4"),)
    prompt = Prompt(prompt_id="a", messages=turns, token_ids=tokenizer.render_prompt(turns), reference="", task="")
    model = load_policy(running.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    params = SamplingParams(temperature=1.3, max_new_tokens=20, num_samples=6)
    (group,) = NativeSampler(model, tokenizer).sample([prompt], params, seed=11)
    rollouts = [each for each in group if isinstance(each, Rollout)]
    expected = [
        tokenizer.decode(each.completion_ids[:-1] if each.finish_reason == "stop" else each.completion_ids)
        for each in rollouts
    ]
    asked = {"model": "toy", "messages": conversation("3+4"), "temperature": 1.3, "max_tokens": 20, "n": 6}
    found = client.chat.completions.create(**asked, seed=11)
    assert [each.message.content for each in found.choices] == expected
    assert [each.finish_reason for each in found.choices] == [each.finish_reason for each in rollouts]
    assert len(set(expected)) > 1
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(each.completion_ids) for each in rollouts)
    again = [each.message.content for each in client.chat.completions.create(**asked, seed=11).choices]
    other = [each.message.content for each in client.chat.completions.create(**asked, seed=12).choices]
    assert again == expected != other


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    asked = {"model": "toy", "messages": conversation("12+30-7"), "max_tokens": 30, "n": 12, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts, finishes, usage, parts = [""] * 12, [""] * 12, None, 0
    for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason or ""
            parts += bool(choice.delta.content)
    assert texts == [each.message.content for each in whole.choices]
    assert finishes == [each.finish_reason for each in whole.choices]
    assert usage == whole.usage
    assert parts > 3


def test_a_stop_text_ends_a_completion_and_is_left_out_whole_or_streamed(client: openai.OpenAI) -> None:
    asked = {"model": "toy", "prompt": "7 + 8 =", "max_tokens": 40, "temperature": 1.0, "logprobs": 0}
    for seed in range(20):
        plain = client.completions.create(**asked, seed=seed).choices[0].text
        if len(plain) > 8:
            break
    stop = plain[4:6]
    place = plain.index(stop)
    found = client.completions.create(**asked, seed=seed, stop=["\x00never", stop]).choices[0]
    assert (found.text, found.finish_reason) == (plain[:place], "stop")
    events = client.completions.create(**asked, seed=seed, stop=stop, stream=True)
    assert "".join(choice.text for event in events for choice in event.choices) == plain[:place]


def test_log_probabilities_are_the_models_and_name_the_likeliest_tokens(
    client: openai.OpenAI, running: Running
) -> None:
    asked = {"model": "toy", "messages": conversation("1"), "temperature": 0, "max_tokens": 5}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert found.logprobs is not None and found.logprobs.content
    for entry in found.logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes or ()) == entry.token.encode()
    model = load_policy(running.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = ChatTokenizer.load(running.checkpoint)
    ids = tokenizer.render_prompt([Message(role="user", content="1")])
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert found.logprobs.content[0].logprob == pytest.approx(float(logprobs.max()), abs=1e-4)
    assert client.chat.completions.create(**asked).choices[0].logprobs is None
    old = client.completions.create(model="toy", prompt="1", max_tokens=4, logprobs=2, seed=0).choices[0].logprobs
    assert old is not None and old.tokens and old.top_logprobs and old.token_logprobs
    assert len(old.tokens) == len(old.token_logprobs) == len(old.text_offset or ())
    assert all(len(each) == 2 for each in old.top_logprobs)


def test_completions_take_texts_and_token_ids(client: openai.OpenAI, running: Running) -> None:
    ids = list(ChatTokenizer.load(running.checkpoint).hf_tokenizer("3 + 4 =").input_ids)
    asked = {"model": "toy", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(**asked, prompt="3 + 4 =").choices[0].text
    several = client.completions.create(**asked, prompt=["3 + 4 =", "9 - 2 ="]).choices
    assert [each.index for each in several] == [0, 1]
    assert several[0].text == one == client.completions.create(**asked, prompt=ids).choices[0].text
    assert client.completions.create(**asked, prompt=[ids, ids]).choices[1].text == one


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == client.models.retrieve("toy/1").id == "toy"
    asked = {"messages": conversation("1"), "max_tokens": 4, "seed": 1}
    texts = [
        client.chat.completions.create(model=name, **asked).choices[0].message.content for name in ("toy", "toy/1")
    ]
    assert texts[0] == texts[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_clients_errors_are_those_that_its_users_expect(client: openai.OpenAI, running: Running) -> None:
    asked = {"model": "toy", "messages": conversation("1"), "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(**asked | {"model": "gpt-9"})
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as refused:
        client.chat.completions.create(**asked, frequency_penalty=0.5)
    assert refused.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="positions") as refused:
        client.chat.completions.create(**asked | {"max_tokens": 30_000})
    assert refused.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{running.url}/v1", api_key="another", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_answer_without_a_limit_ends_within_the_models_positions(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="toy", messages=conversation("5"), seed=3, temperature=1.5, n=4)
    assert found.usage is not None
    assert found.usage.prompt_tokens + max(1, found.usage.completion_tokens // 4) <= 128
