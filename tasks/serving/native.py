"""Native engine of the server: completions token by token, with the decoding of rollouts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.models.architectures import supports_prompt_sharing
from rlcore.sampling.decoding import argmax_tokens, decode, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.sampling.library_decoding import decode_by_library
from rlcore.seeding import generator
from rlcore.tasks.serving.engine import FinishReason, Job, Piece, TokenLogprob
from rlcore.text.tokenization import ChatTokenizer

_ALWAYS_DECODED = 100  # up to this number of tokens each one is decoded; in longer texts, every 1 % of the length
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
Send = Callable[[Piece | BaseException | None], None]


class NativeEngine:
    """Engine that computes one job at a time in one thread, while others wait."""

    def __init__(self, model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
        self._model, self._tokenizer = model.requires_grad_(False).eval(), tokenizer
        self._shares_prompts = supports_prompt_sharing(model)
        if self._shares_prompts:
            self._model.set_attn_implementation(GROUPED_ATTENTION)
        self._model.generation_config = GenerationConfig()  # the model's default may filter the distribution
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """Yield the pieces of a job; see :class:`rlcore.tasks.serving.engine.Engine`."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | BaseException | None]()
        cancelled = threading.Event()

        def send(piece: Piece | BaseException | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        waiting = self._thread.submit(self._run, job, send, cancelled)
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            cancelled.set()
            waiting.cancel()

    def is_healthy(self) -> bool:
        """Return True: the engine is in the server's process."""
        return True

    @torch.inference_mode()
    def _run(self, job: Job, send: Send, cancelled: threading.Event) -> None:
        together = job.num_samples if self._shares_prompts else 1
        try:
            for first in range(0, job.num_samples, together):
                indices = range(first, first + together)
                writer = _Writer(job, indices, self._tokenizer, send, cancelled)
                (decode if self._shares_prompts else decode_by_library)(
                    self._model,
                    [job.prompt_ids] * together,
                    _uniforms(job, indices).to(self._model.device),
                    choose=writer.choose,
                    eos_ids=torch.tensor(self._tokenizer.eos_ids, device=self._model.device),
                )
                writer.end()
        except _CancelledError:
            pass
        except torch.OutOfMemoryError as error:
            send(SamplingError(f"out of memory: {str(error).splitlines()[0]}"))
        except Exception as error:  # noqa: BLE001  (reported to the request that caused it)
            send(error)
        finally:
            send(None)


class _CancelledError(Exception):
    """Signal that the client no longer waits for the completion."""


class _Choice:
    """Completion in progress. ``sent``: characters of its text that were sent."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.sent = self.num_sent = self.looked = 0

    @property
    def is_due(self) -> bool:
        """True if its text is to be decoded now. Decoding the whole text at each token would be quadratic."""
        return len(self.ids) <= _ALWAYS_DECODED or len(self.ids) - self.looked > len(self.ids) // _ALWAYS_DECODED


class _Writer:
    """Sampler for :func:`rlcore.sampling.decoding.decode` that sends the text of its tokens."""

    def __init__(
        self, job: Job, indices: range, tokenizer: ChatTokenizer, send: Send, cancelled: threading.Event
    ) -> None:
        self._job, self._tokenizer, self._send, self._cancelled = job, tokenizer, send, cancelled
        self._choices = [_Choice(index) for index in indices]
        self._rows = list(self._choices)
        self._draw = partial(sample_tokens, temperature=job.temperature) if job.temperature else argmax_tokens

    def choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens from logits [R, V] and uniforms [R], with their logprobs; an EOS id ends a row.

        Raises:
            SamplingError: the model computes NaN or infinity.
        """
        if self._cancelled.is_set():
            raise _CancelledError
        if len(logits) < len(self._rows):  # finished ones were dropped together
            self._rows = [row for row in self._rows if row.finish is None]
        tokens, logprobs = self._draw(logits, uniforms)
        if not logprobs.isfinite().all():
            raise SamplingError("the model computes NaN or infinity")
        shown = None if self._job.top_logprobs is None else logits.float().log_softmax(-1)
        eos_ids = self._tokenizer.eos_ids
        for place, (row, token) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            if row.finish is not None:
                continue
            row.ids.append(token)
            if shown is not None:
                row.logprobs.append(self._logprob(shown[place], token))
            if token in eos_ids:
                row.finish = "stop"
            self._look(row)
            if row.finish is not None and token not in eos_ids:  # at a stop text
                tokens[place] = eos_ids[0]
        return tokens, logprobs

    def end(self) -> None:
        """Send the rest of completions that no EOS id and no stop text has ended."""
        for choice in self._choices:
            if choice.finish is None:
                choice.finish = "length"
                self._look(choice)

    def _look(self, choice: _Choice) -> None:
        if choice.finish is None and not choice.is_due:
            return
        choice.looked = len(choice.ids)
        has_ended = choice.finish == "stop"  # by an EOS id, which has no text
        text = self._tokenizer.decode(choice.ids[:-1] if has_ended else choice.ids)
        stops = [place for stop in self._job.stop if (place := text.find(stop)) >= 0]
        if stops:
            text, choice.finish = text[: min(stops)], "stop"
        ready = text if choice.finish else text[: len(text) - _held_back(text, self._job.stop)]
        if len(ready) > choice.sent or choice.finish:
            self._send(
                Piece(
                    index=choice.index,
                    text=ready[choice.sent :],
                    num_tokens=len(choice.ids) - choice.num_sent,
                    logprobs=tuple(choice.logprobs),
                    finish=choice.finish,
                )
            )
            choice.sent, choice.num_sent, choice.logprobs = max(choice.sent, len(ready)), len(choice.ids), []

    def _logprob(self, distribution: torch.Tensor, token: int) -> TokenLogprob:
        values, ids = distribution.topk(min(self._job.top_logprobs or 0, len(distribution)))
        values = values.clamp(min=_LEAST_LOGPROB)
        top = zip(map(self._name, ids.tolist()), values.tolist(), strict=True)
        return TokenLogprob(self._name(token), float(distribution[token]), tuple(top))

    def _name(self, token: int) -> str:
        return str(self._tokenizer.hf_tokenizer.decode([token]))


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Count the last characters that may still change: an incomplete character, or the beginning of a stop text."""
    begun = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max([len(text) - len(text.rstrip("\ufffd")), *begun])


def _uniforms(job: Job, indices: range) -> torch.Tensor:
    """Return random numbers in [0, 1), float32 [S, N]: those of the rollout sampler."""
    streams = [generator(job.seed, job.place, index) for index in indices]
    return torch.stack([torch.rand(job.max_tokens, generator=stream) for stream in streams])
