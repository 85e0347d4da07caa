"""The built-in engine by itself: long texts, models that the library decodes, jobs that nobody waits for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.errors import SamplingError
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.openai_api.replies import Piece
from rlcore.openai_api.requests import Options
from rlcore.tasks.serving.engine import Job
from rlcore.tasks.serving.native import NativeEngine
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import SHAPE
from tests.waiting import LONG

OPTIONS = Options(model="toy", seed=5)
JOB = Job(prompt_ids=(40, 41, 42), max_tokens=300, options=OPTIONS)


def job_of(max_tokens: int = 300, prompt_ids: tuple[int, ...] = JOB.prompt_ids, **options: Any) -> Job:
    return Job(prompt_ids=prompt_ids, max_tokens=max_tokens, options=dataclasses.replace(OPTIONS, **options))


@pytest.fixture(scope="module")
def long_winded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 512 positions, whose answers hardly ever end by themselves."""
    folder = tmp_path_factory.mktemp("native") / "toy"
    shape = dataclasses.replace(SHAPE, max_positions=512)
    import_model(ModelConfig(source="scratch", shape=shape, license="Apache-2.0"), folder, seed=3)
    return folder


def engine_of(checkpoint: Path, dtype: torch.dtype = torch.float32) -> NativeEngine:
    model = load_policy(checkpoint, device=torch.device("cpu"), dtype=dtype)
    return NativeEngine(model, ChatTokenizer.load(checkpoint))


def pieces_of(engine: NativeEngine, job: Job) -> list[Piece]:
    async def run() -> list[Piece]:
        return [piece async for piece in engine.generate(job)]

    return asyncio.run(run())


def texts(pieces: list[Piece]) -> dict[int, str]:
    found: dict[int, str] = {}
    for piece in pieces:
        found[piece.index] = found.get(piece.index, "") + piece.text
    return dict(sorted(found.items()))


def test_the_pieces_of_a_long_text_are_the_text_and_a_stop_far_inside_is_found(long_winded: Path) -> None:
    engine = engine_of(long_winded)
    for seed in range(50):  # each has a chance of one in three not to draw the one EOS id
        job = job_of(seed=seed, top_logprobs=0)
        pieces = pieces_of(engine, job)
        if pieces[-1].finish == "length":
            break
    assert sum(each.num_tokens for each in pieces) == 300
    assert sum(len(each.logprobs) for each in pieces) == 300
    assert 100 < len(pieces) < 300  # later texts are looked at less often
    text = texts(pieces)[0]
    for stop in (text[30:33], text[-8:-5]):  # of which a part has come before the rest, and far inside
        stopped = pieces_of(engine, job_of(seed=seed, top_logprobs=0, stop=("never said", stop)))
        assert texts(stopped) == {0: text[: text.index(stop)]}
        assert stopped[-1].finish == "stop"
    assert text.index(text[-8:-5]) > 100


def test_a_model_that_the_library_decodes_says_the_same(long_winded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = long_winded.parent / "ending"
    if not folder.exists():
        folder.mkdir()
        for file in long_winded.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        settings = json.loads((folder / "generation_config.json").read_text())
        ends = settings | {"eos_token_id": list(range(1, 262, 20))}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    job = job_of(24, n=6)
    ours = pieces_of(engine_of(folder), job)
    monkeypatch.setattr("rlcore.tasks.serving.native.supports_prompt_sharing", lambda model: False)
    theirs = pieces_of(engine_of(folder), job)
    assert texts(ours) == texts(theirs)
    assert len(texts(ours)) == 6
    ends_of = [sorted((each.index, each.finish) for each in pieces if each.finish) for pieces in (ours, theirs)]
    assert ends_of[0] == ends_of[1]
    assert {finish for _, finish in ends_of[0]} == {"stop", "length"}


def test_a_job_that_nobody_waits_for_gives_way_to_the_next(long_winded: Path) -> None:
    engine, steps, left = engine_of(long_winded), [0], threading.Event()

    def count(*_: object) -> None:
        steps[0] += 1
        if steps[0] == 5:  # the engine waits here until its client has gone
            left.wait(LONG)

    engine._model.register_forward_hook(count)

    async def leave_and_ask_again() -> list[Piece]:
        async with aclosing(engine.generate(job_of(500, n=16))) as pieces:
            async for _ in pieces:
                break
        left.set()
        return [piece async for piece in engine.generate(job_of(3))]

    assert sum(each.num_tokens for each in asyncio.run(leave_and_ask_again())) == 3
    assert steps[0] <= 8  # five of the first job, up to three of the second


def test_jobs_that_wait_are_decoded_together_and_each_says_what_it_says_alone(long_winded: Path) -> None:
    engine, steps, begun = engine_of(long_winded, torch.float64), [0], threading.Event()  # rounding turns no token
    jobs = [
        job_of(
            10 + 7 * number,
            prompt_ids=tuple(range(40, 43 + number % 3)),
            n=1 + number % 2,
            temperature=(0.0, 0.7, 1.0)[number % 3],
            seed=number,
            top_logprobs=2 if number % 4 == 0 else None,
        )
        for number in range(12)
    ]
    alone = [pieces_of(engine, job) for job in jobs]
    stop = texts(alone[5])[0][3:5]
    jobs[5] = dataclasses.replace(jobs[5], options=dataclasses.replace(jobs[5].options, stop=(stop,)))
    alone[5] = pieces_of(engine, jobs[5])

    def count(*_: object) -> None:
        steps[0] += 1
        if steps[0] == 1:  # a first job is computed until all others wait
            begun.wait(LONG)

    engine._model.register_forward_hook(count)

    async def ask(job: Job) -> list[Piece]:
        return [piece async for piece in engine.generate(job)]

    async def all_at_once() -> list[list[Piece]]:
        tasks = [asyncio.create_task(ask(job)) for job in (job_of(2), *jobs)]
        await asyncio.sleep(0.2)
        begun.set()
        return [await each for each in tasks][1:]

    together = asyncio.run(all_at_once())
    assert [texts(each) for each in together] == [texts(each) for each in alone]
    ends = [[sorted((p.index, p.finish) for p in pieces if p.finish) for pieces in each] for each in (together, alone)]
    assert ends[0] == ends[1]
    assert sum(len(piece.logprobs) for piece in together[0]) == jobs[0].max_tokens * jobs[0].options.n
    longest = max(job.max_tokens for job in jobs)
    assert steps[0] <= longest + 4  # one pass for each token of the longest, and the first job


def test_a_model_that_computes_nan_is_an_error_and_no_text(long_winded: Path) -> None:
    engine = engine_of(long_winded)
    with torch.no_grad():
        next(engine._model.parameters()).fill_(float("nan"))
    with pytest.raises(SamplingError, match="NaN"):
        pieces_of(engine, JOB)
