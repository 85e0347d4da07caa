"""Native engine of the server: completions token by token, with the decoding of rollouts."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.models.architectures import max_positions, supports_prompt_sharing
from rlcore.openai_api.replies import Piece, TokenLogprob
from rlcore.sampling.decoding import argmax_tokens, decode, decode_by_library, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION, find_gaps
from rlcore.seeding import generator
from rlcore.tasks.serving.engine import Job
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FinishReason

_ALWAYS_DECODED = 100  # up to this number of tokens each one is decoded; in longer texts, every 1 % of the length
_MAX_ROWS = 32  # completions that are decoded together
_MAX_PREFILL_TOKENS = 16_384  # padded prompt tokens of jobs that are decoded together
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
Send = Callable[[Piece | BaseException | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A job that waits, its client, and whether that has gone."""

    job: Job
    send: Send
    cancelled: threading.Event


class NativeEngine:
    """Engine that decodes the waiting jobs together, in one thread. Jobs that come meanwhile wait for their end.

    Their random numbers do not depend on each other.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
        self._model, self._tokenizer = model.requires_grad_(False).eval(), tokenizer
        self._shares_prompts = supports_prompt_sharing(model)
        if self._shares_prompts:
            self._model.set_attn_implementation(GROUPED_ATTENTION)
        self._model.generation_config = GenerationConfig()  # the model's default may filter the distribution
        self._positions = max_positions(model.config) or sys.maxsize
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting: deque[_Work] = deque()
        self._max_rows = _MAX_ROWS  # reduced when memory runs out

    async def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """Yield the pieces of a job."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | BaseException | None]()

        def send(piece: Piece | BaseException | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work = _Work(job, send, threading.Event())
        self._waiting.append(work)
        self._thread.submit(self._run_waiting)  # finds nothing to do if an earlier call took the job
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            work.cancelled.set()

    def is_healthy(self) -> bool:
        """Return True: the engine is in the server's process."""
        return True

    def _take(self) -> list[_Work]:
        """Take the first waiting jobs that fit together, in their order; only this thread takes any."""
        taken: list[_Work] = []
        while self._waiting:
            work = self._waiting[0]
            if not work.cancelled.is_set():
                if taken and not self._fit([each.job for each in (*taken, work)]):
                    break
                taken.append(work)
            self._waiting.popleft()
        return taken

    def _fit(self, jobs: Sequence[Job]) -> bool:
        longest, tokens = max(len(job.prompt_ids) for job in jobs), max(job.max_tokens for job in jobs)
        rows, prompts = sum(job.options.n for job in jobs), len({job.prompt_ids for job in jobs})
        fits = rows <= self._max_rows and prompts * longest <= _MAX_PREFILL_TOKENS
        return self._shares_prompts and fits and longest + tokens <= self._positions

    @torch.inference_mode()
    def _run_waiting(self) -> None:
        taken = self._take()
        rows = [_Choice(work, index) for work in taken for index in range(work.job.options.n)]
        try:
            for together in [rows] if self._shares_prompts else [[row] for row in rows]:
                if together:
                    self._decode(together)
        except CancelledError:
            pass
        except torch.OutOfMemoryError as error:
            self._max_rows = max(1, len(rows) // 2)
            for work in taken:
                work.send(SamplingError(f"out of memory: {str(error).splitlines()[0]}"))
        except Exception as error:  # noqa: BLE001  (reported to the requests)
            for work in taken:
                work.send(error)
        finally:
            for work in taken:
                work.send(None)

    def _decode(self, rows: Sequence[_Choice]) -> None:
        writer = _Writer(rows, self._tokenizer)
        (decode if self._shares_prompts else decode_by_library)(
            self._model,
            [row.job.prompt_ids for row in rows],
            _uniforms(rows).to(self._model.device),
            choose=writer.choose,
            eos_ids=torch.tensor(self._tokenizer.eos_ids, device=self._model.device),
        )


class _Choice:
    """Completion in progress. ``sent``: characters of its text that were sent."""

    def __init__(self, work: _Work, index: int) -> None:
        self.work, self.job, self.index = work, work.job, index
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.sent = self.num_sent = self.looked = 0

    @property
    def is_due(self) -> bool:
        """True if its text is to be decoded: at each token that would be quadratic."""
        return len(self.ids) <= _ALWAYS_DECODED or len(self.ids) - self.looked > len(self.ids) // _ALWAYS_DECODED


class _Writer:
    """Sampler for :func:`rlcore.sampling.decoding.decode` that sends the text of its tokens."""

    def __init__(self, rows: Sequence[_Choice], tokenizer: ChatTokenizer) -> None:
        self._rows, self._tokenizer = list(rows), tokenizer

    def choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens from logits [R, V] and uniforms [R], with their logprobs; an EOS id ends a row.

        Raises:
            SamplingError: the model computes NaN or infinity.
            CancelledError: no client waits for the completions.
        """
        if all(row.work.cancelled.is_set() or row.finish for row in self._rows):
            raise CancelledError
        if len(logits) < len(self._rows):  # finished ones were dropped together
            gaps = find_gaps(torch.tensor([row.finish is None for row in self._rows]), len(logits))
            self._rows = [self._rows[place] for place in gaps.close(torch.arange(len(self._rows))).tolist()]
        tokens, logprobs = self._draw(logits, uniforms)
        if not logprobs.isfinite().all():
            raise SamplingError("the model computes NaN or infinity")
        eos_ids = self._tokenizer.eos_ids
        for place, (row, token) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            if row.finish is not None:
                continue
            row.ids.append(token)
            if row.job.options.top_logprobs is not None:
                row.logprobs.append(
                    self._logprob(logits[place].float().log_softmax(-1), token, row.job.options.top_logprobs)
                )
            if token in eos_ids or row.work.cancelled.is_set():
                row.finish = "stop"
            elif len(row.ids) == row.job.max_tokens:
                row.finish = "length"
            self._look(row, has_ended=token in eos_ids)
            if row.finish is not None and token not in eos_ids:  # at a stop text, at the limit, or nobody waits
                tokens[place] = eos_ids[0]
        return tokens, logprobs

    def _draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temperatures = torch.tensor([row.job.options.temperature for row in self._rows], device=logits.device)
        is_greedy = temperatures == 0.0
        if is_greedy.all():
            return argmax_tokens(logits, uniforms)
        drawn = sample_tokens(logits, uniforms, temperature=torch.where(is_greedy, 1.0, temperatures)[:, None])
        if not is_greedy.any():
            return drawn
        likeliest = argmax_tokens(logits, uniforms)
        return torch.where(is_greedy, likeliest[0], drawn[0]), torch.where(is_greedy, likeliest[1], drawn[1])

    def _look(self, choice: _Choice, *, has_ended: bool) -> None:
        """Send the text that is new; ``has_ended``: by an EOS id, which has no text."""
        if choice.finish is None and not choice.is_due:
            return
        choice.looked = len(choice.ids)
        text = self._tokenizer.decode(choice.ids[:-1] if has_ended else choice.ids)
        stops = [place for stop in choice.job.options.stop if (place := text.find(stop)) >= 0]
        if stops:
            text, choice.finish = text[: min(stops)], "stop"
        ready = text if choice.finish else text[: len(text) - _held_back(text, choice.job.options.stop)]
        if len(ready) > choice.sent or choice.finish:
            choice.work.send(
                Piece(
                    index=choice.index,
                    text=ready[choice.sent :],
                    num_tokens=len(choice.ids) - choice.num_sent,
                    logprobs=tuple(choice.logprobs),
                    finish=choice.finish,
                )
            )
            choice.sent, choice.num_sent, choice.logprobs = max(choice.sent, len(ready)), len(choice.ids), []

    def _logprob(self, distribution: torch.Tensor, token: int, count: int) -> TokenLogprob:
        values, ids = distribution.topk(min(count, len(distribution)))
        values = values.clamp(min=_LEAST_LOGPROB)
        top = zip(map(self._name, ids.tolist()), values.tolist(), strict=True)
        return TokenLogprob(self._name(token), float(distribution[token]), tuple(top))

    def _name(self, token: int) -> str:
        return str(self._tokenizer.hf_tokenizer.decode([token]))


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Count the last characters that may still change: an incomplete character, or the beginning of a stop text."""
    return max([len(text) - len(text.rstrip("\ufffd")), *(_begun(text, stop) for stop in stops)])


def _begun(text: str, stop: str) -> int:
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return len(text) - place if place >= 0 else 0


def _uniforms(rows: Sequence[_Choice]) -> torch.Tensor:
    """Return random numbers in [0, 1), float32 [S, N]: those of the rollout sampler; 0 after the limit of a row."""
    found = torch.zeros(len(rows), max(row.job.max_tokens for row in rows))
    for values, row in zip(found, rows, strict=True):
        stream = generator(row.job.options.seed, row.job.place, row.index)
        values[: row.job.max_tokens] = torch.rand(row.job.max_tokens, generator=stream)
    return found
