"""An episode that is open at a gateway, with scripted or random answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlcore.agents.gateway import Gateway
from rlcore.agents.sampler import AgentSampler
from rlcore.agents.sampler import Episode as Played
from rlcore.agents.session import Session
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.gateways import LIMITS, Episode, running, scripted
from tests.rlcore.agents.programs import Play, agent


@pytest.fixture
def episode(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> Episode:
    """A function that opens an episode: of these turns, or of an engine's answers; ``limits``: other limits."""

    @contextmanager
    def opened(
        *turns: str,
        engine: Callable[[ChatTokenizer], Sampler] | None = None,
        own: ChatTokenizer = tokenizer,
        **limits: Any,
    ) -> Iterator[tuple[Gateway, Session]]:
        made = scripted(own, prompts[0].prompt_id, turns) if engine is None else engine(own)
        with running(made, own, dataclasses.replace(LIMITS, **limits)) as gateway:
            yield gateway, gateway.open(prompts[0], place=0, sample=0)

    return opened


@pytest.fixture
def play(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> Play:
    """A function that plays an episode of a program, whether it fails or not."""

    def played(code: str, before: Callable[[], object] = lambda: None, **settings: object) -> Played:
        sampler = AgentSampler(Parrot(tokenizer, before=before), tokenizer, agent(code, **settings))
        params = SamplingParams(temperature=1.0, max_new_tokens=100, num_samples=1)
        return sampler.play([dataclasses.replace(prompts[0], prompt_id="p-1")], params, seed=0)[0][0]

    return played
