"""A registered version through MLflow's own functions: load_model, pyfunc, and the files on the disk."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from rlcore.models.heads import HEAD_FILE, ScalarHeadModel, score_rewards
from rlcore.models.loading import load_policy
from rlcore.models.reward_ensemble import save_members
from rlcore.models.reward_scale import RewardScale, RewardScales
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.mlflow_model import Cards, Package, checkpoint_in, is_chat_model
from rlcore.tasks.tracking.registration import register_model
from rlcore.tasks.tracking.registry import ModelVersion, download_model, find_version, set_alias
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, make_checkpoint, our_answers
from tests.registered import sealed

NAME = "tiny-v1.2-grpo"
CARDS = Cards(model="---\nlicense: apache-2.0\n---\n# A card\n", data="# Data\n", license_id="Apache-2.0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("artifact") / "model")


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


@pytest.fixture
def champion(tracker: Tracker, checkpoint: Path) -> ModelVersion:
    run = tracker.start_run("tiny", "grpo", tags={})
    package, sha256 = sealed(checkpoint, CARDS)
    package = dataclasses.replace(package, facts={"preset": "tiny"})
    version = register_model(run, package, name=NAME, tags={"sha256": sha256})
    set_alias(tracker, version, "champion")
    return version


def files_of(home: Home) -> Path:
    """The only model's folder in MLflow's store."""
    (folder,) = (home.mlartifacts / "tiny" / "models").glob("*/artifacts")
    return folder


def test_the_pipeline_that_mlflow_loads_answers_as_the_evaluation_does(
    champion: ModelVersion, checkpoint: Path
) -> None:
    import mlflow

    chat = mlflow.transformers.load_model(f"models:/{NAME}@champion")
    found = [
        chat(conversation(each), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, return_full_text=False)
        for each in QUESTIONS
    ]
    expected = our_answers(checkpoint)
    assert [each[0]["generated_text"] for each in found] == [text for _, text in expected]
    lengths = {len(ids) for ids, _ in expected}
    assert len(lengths) > 1  # some end with an EOS id of the generation configuration
    assert chat.model.generation_config.eos_token_id == list(range(1, 262, 3))


def test_pyfunc_takes_messages_and_answers_greedily_with_the_chat_template(
    champion: ModelVersion, checkpoint: Path
) -> None:
    import mlflow

    model = mlflow.pyfunc.load_model(f"models:/{NAME}/{champion.version}")
    for question, (ids, text) in zip(QUESTIONS, our_answers(checkpoint), strict=True):
        (answer,) = model.predict({"messages": conversation(question), "max_tokens": MAX_NEW_TOKENS})
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": text.lstrip()}  # MLflow strips it
        assert answer["usage"]["completion_tokens"] == len(ids)
        assert answer["model"] == NAME


def test_a_version_has_signature_example_cards_and_requirements_and_no_place_of_this_machine(
    champion: ModelVersion, tracked_home: Home, tmp_path: Path
) -> None:
    folder = files_of(tracked_home)
    record: dict[str, Any] = yaml.safe_load((folder / "MLmodel").read_text())
    assert "messages" in record["signature"]["inputs"]
    assert record["metadata"] == {"preset": "tiny", "task": "llm/v1/chat"}
    assert record["model_id"] == champion.model_id
    assert record["model_size_bytes"] > (folder / "model" / "model.safetensors").stat().st_size
    assert json.loads((folder / "serving_input_example.json").read_text())["messages"]
    assert (folder / "model_card.md").read_text() == CARDS.model
    assert (folder / "data_card.md").read_text() == CARDS.data
    assert "Apache-2.0" in (folder / "LICENSE.txt").read_text()
    assert "transformers==" in (folder / "requirements.txt").read_text()
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not [text for text in texts if "/tmp" in text or str(tmp_path) in text]
    assert not list(folder.rglob("*.pkl"))


def test_the_weights_lie_on_the_disk_once(champion: ModelVersion, tracked_home: Home, checkpoint: Path) -> None:
    stored = files_of(tracked_home) / "model" / "model.safetensors"
    assert stored.samefile(checkpoint / "model.safetensors")


def test_the_run_names_the_model_that_it_made(champion: ModelVersion, tracker: Tracker) -> None:
    model = tracker.client.get_logged_model(champion.model_id)
    run = tracker.client.get_run(model.source_run_id)
    assert [each.model_id for each in run.outputs.model_outputs] == [champion.model_id]
    assert model.name == "tiny-v1_2-grpo"  # MLflow takes no dot there; the registered name keeps it
    assert find_version(tracker, NAME, "champion") == champion


def test_the_downloaded_checkpoint_is_the_one_that_was_registered(
    champion: ModelVersion, checkpoint: Path, tmp_path: Path
) -> None:
    loaded = download_model(f"models:/{NAME}@champion", tmp_path / "loaded")
    names = {path.name for path in checkpoint.iterdir()}
    assert {path.name for path in loaded.iterdir()} == names
    assert all((loaded / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)


def test_a_tokenizer_that_mlflow_has_put_apart_is_found(tmp_path: Path) -> None:
    for place in ("model/config.json", "components/tokenizer/tokenizer.json"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("{}")
    (tmp_path / "MLmodel").write_text("flavors: {}")
    assert {path.name for path in checkpoint_in(tmp_path).iterdir()} == {"config.json", "tokenizer.json"}


def test_a_reward_model_is_no_chat_model(checkpoint: Path, tmp_path: Path) -> None:
    assert is_chat_model(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / HEAD_FILE).write_bytes(b"")
    assert not is_chat_model(tmp_path)


def test_a_reward_model_scores_answers_through_mlflow_as_it_does_in_training(
    tracker: Tracker, checkpoint: Path, tmp_path: Path
) -> None:
    import mlflow

    folder = tmp_path / "reward_model"
    shutil.copytree(checkpoint, folder)
    backbone = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    scorer = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(0))
    save_members((scorer,), folder)
    RewardScales(members=(RewardScale(shift=0.5, scale=2.0),)).save(folder)
    run = tracker.start_run("tiny", "reward_model", tags={})
    register_model(run, Package(checkpoint=folder, cards=CARDS), name="tiny-reward_model", tags={"sha256": "cd"})
    model = mlflow.pyfunc.load_model("models:/tiny-reward_model/1")
    rows = pd.DataFrame({"messages": [conversation("3+4"), conversation("1")], "completion": ["7", "#### 1"]})
    tokenizer = ChatTokenizer.load(checkpoint)
    rendered = [
        tokenizer.render_demonstration([Message(role="user", content=question)], answer)
        for question, answer in (("3+4", "7"), ("1", "#### 1"))
    ]
    sequences = [TokenSequence(prompt_ids=prompt, completion_ids=completion) for prompt, completion in rendered]
    expected = (score_rewards(scorer, sequences, tokens_per_microbatch=100) - 0.5) / 2.0
    assert model.predict(rows) == pytest.approx(expected.tolist(), abs=1e-5)
    assert model.metadata.signature.inputs.input_names() == ["messages", "completion"]
