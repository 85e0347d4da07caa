"""A toy model behind the front, at a real address of this machine: what the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlcore.models.loading import load_policy
from rlcore.openai_api.guard import LOOPBACK, Limits
from rlcore.openai_api.server import ServerThread
from rlcore.tasks.serving.engine import Engine
from rlcore.tasks.serving.front import Served, front
from rlcore.tasks.serving.native import NativeEngine
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import SHAPE, make_checkpoint

TOKEN = "a-token-of-the-tests"


@dataclass(frozen=True)
class Running:
    """A server under test: where it listens, and the checkpoint that it serves."""

    port: int
    checkpoint: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(checkpoint: Path, engine: Engine | None = None, limits: Limits | None = None) -> Iterator[Running]:
    """The front at a free port, by the built-in engine unless another is given."""
    tokenizer = ChatTokenizer.load(checkpoint)
    if engine is None:
        model = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        engine = NativeEngine(model, ChatTokenizer.load(checkpoint))
    served = Served(name="toy", alias="toy/1", tokenizer=tokenizer, positions=SHAPE.max_positions)
    app = front(served, engine, token=TOKEN, hosts=LOOPBACK, limits=limits or Limits())
    server = ServerThread(app)
    yield Running(server.start(), checkpoint)
    server.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("serving") / "toy")


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Iterator[Running]:
    with serving(checkpoint) as made:
        yield made
