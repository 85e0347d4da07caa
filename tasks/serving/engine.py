"""Engine interface of the server: token ids in, pieces of text out; and the client of vLLM's server.

That one is behind the front, on the loopback address with its own key; it receives token ids.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from rlcore.errors import SamplingError
from rlcore.openai_api.replies import Piece, TokenLogprob
from rlcore.openai_api.requests import Options
from rlcore.types import FinishReason

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Completions of one prompt. ``place``: its number in the request; it and the seed determine the draws."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    options: Options
    place: int = 0


class Engine(Protocol):
    """Engine that completes prompts. Closing the iterator ends the work on it."""

    def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """Yield the pieces of all completions of a job, in any order.

        Raises:
            SamplingError: the engine is broken.
        """
        ...

    def is_healthy(self) -> bool:
        """Return True if it accepts jobs."""
        ...


class VllmEngine:
    """Client of the server at ``url`` for completions of the model ``name``; ``key`` authenticates it.

    ``eos_ids`` end a completion, whatever the server's generation configuration contains.
    """

    def __init__(self, url: str, key: str, name: str, eos_ids: tuple[int, ...]) -> None:
        self._name, self._eos_ids = name, eos_ids
        # A loopback address needs no proxy; the front limits the time.
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._is_healthy = True

    async def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """Yield the pieces of a job."""
        try:
            async with self._client.stream("POST", "/v1/completions", json=self._question(job)) as answer:
                if answer.status_code != httpx.codes.OK:
                    reply = (await answer.aread()).decode(errors="replace")[:500]
                    raise SamplingError(f"vLLM answered {answer.status_code}: {reply}")
                async for line in _lines(answer):
                    for piece in _pieces(line):
                        yield piece
            self._is_healthy = True
        except httpx.HTTPError as error:
            self._is_healthy = False
            raise SamplingError(f"vLLM does not answer: {type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()

    def is_healthy(self) -> bool:
        """Return True if the server answered the last request."""
        return self._is_healthy

    def _question(self, job: Job) -> dict[str, Any]:
        """Return the request. It samples from the whole distribution, whatever the model's generation config."""
        options = job.options
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        return whole | {
            "model": self._name,
            "prompt": list(job.prompt_ids),
            "max_tokens": job.max_tokens,
            "n": options.n,
            "temperature": options.temperature,
            "seed": (options.seed + job.place) % 2**63,
            "stop": list(options.stop),
            "stop_token_ids": list(self._eos_ids),
            "logprobs": options.top_logprobs,
            "stream": True,
            "return_token_ids": True,
        }


async def _lines(answer: httpx.Response) -> AsyncGenerator[str]:
    """Yield the lines of an event stream; those of httpx end at every separator of Unicode, which a text may have."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def _pieces(line: str) -> list[Piece]:
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if not data or data == "[DONE]":
        return []
    event = json.loads(data)
    if "error" in event:
        raise SamplingError(f"vLLM answered: {str(event['error'])[:500]}")
    return [_piece(choice) for choice in event["choices"]]


def _piece(choice: Mapping[str, Any]) -> Piece:
    finish: FinishReason | None = None
    if choice.get("finish_reason"):
        finish = "length" if choice["finish_reason"] == "length" else "stop"
    return Piece(
        index=choice["index"],
        text=choice["text"],
        num_tokens=len(choice.get("token_ids") or ()),
        logprobs=_logprobs(choice.get("logprobs")),
        finish=finish,
    )


def _logprobs(found: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...]:
    if not found:
        return ()
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    return tuple(
        TokenLogprob(text, value, tuple((top or {}).items()))
        for text, value, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    )
