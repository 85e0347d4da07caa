"""Registered models: files, cards, figures, and MLflow's own functions that load them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from mlflow import MlflowClient

from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.mlflow_model import Card, Package, checkpoint_in
from rlcore.tasks.tracking.model_card import body_of, refresh_cards, write_card
from rlcore.tasks.tracking.registry import (
    ModelVersion,
    count_look,
    download_model,
    find_by_sha256,
    find_number,
    find_version,
    register_model,
    set_alias,
    set_tags,
)
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, make_checkpoint, our_answers
from tests.registered import Killed, register_toy, register_versions, sealed
from tests.tasks.homes import copy_home, new_home


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def checkpoint(folder: Path) -> Package:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return Package(checkpoint=folder, card=Card(text="", license_id=""))


def test_a_model_is_registered_as_files_and_found_by_its_alias(tracker: Tracker, tmp_path: Path) -> None:
    folder, sha256 = sealed(checkpoint(tmp_path / "artifact" / "model").checkpoint)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    first = register_model(run, folder, name="tiny-grpo", tags={"sha256": "ab"})
    second = register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256})
    assert (first.version, second.version, second.sha256) == (1, 2, sha256)
    assert find_version(tracker, "tiny-grpo", "champion") is None
    assert find_version(tracker, "nothing", "champion") is None
    set_alias(tracker, second, "champion")
    assert find_version(tracker, "tiny-grpo", "champion") == second
    loaded = download_model("models:/tiny-grpo@champion", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == '{"hidden_size": 8}'
    assert not any(path.suffix == ".pkl" for path in (tmp_path / "home" / "mlartifacts").rglob("*"))


@pytest.mark.parametrize(
    "call", ["create_logged_model", "finalize_logged_model", "log_outputs", "log_batch", "create_model_version"]
)
def test_a_registration_that_was_killed_is_done_again_with_what_it_had_begun(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    folder, sha256 = sealed(checkpoint(tmp_path / "artifact" / "model").checkpoint)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    with monkeypatch.context() as killed, pytest.raises(Killed):
        killed.setattr(MlflowClient, call, die)
        register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256}, metrics={"loss": 0.5})
    version = register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256}, metrics={"loss": 0.5})
    assert version.version == 1
    (model,) = tracker.client.search_logged_models([run.experiment_id])
    assert (model.model_id, str(model.status)) == (version.model_id, "READY")
    assert [metric.value for metric in model.metrics or []] == [0.5]
    assert len(tracker.client.get_run(run.run_id).outputs.model_outputs) == 1
    assert len(tracker.client.get_metric_history(run.run_id, "loss")) == 1
    loaded = download_model("models:/tiny-grpo/1", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == '{"hidden_size": 8}'


@pytest.fixture
def versions(tracker: Tracker, tmp_path: Path) -> list[ModelVersion]:
    return register_versions(tracker, tmp_path / "model", "m")


def test_every_new_pair_on_some_data_is_a_look(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    def look(data: str, pair: str, name: str = "m") -> int:
        return count_look(tracked_home, tracker, name, data=data, pair=pair)

    assert [look("d1", "b-a"), look("d1", "c-a"), look("d1", "b-a"), look("d2", "b-a")] == [1, 2, 1, 1]
    assert look("d1", "c-b") == 3
    tracker.client.create_registered_model("other")
    for name in ("m", "other"):
        record_action(tracked_home, "refuse", f"{name}/1", {})
    assert [look("d1", "e-d", "other"), look("d1", "e-d", "other"), look("d1", "f-a")] == [4, 4, 5]
    assert look("d1", "b-a", "other") == 1  # the very comparison, under another name
    tracker.client.create_registered_model("theirs", tags={"look.d1.g-a": "-2", "look.d1.h-a": "many"})
    assert [look("d1", "g-a"), look("d1", "h-a")] == [6, 7]  # anybody makes a model with tags


def test_a_version_is_found_by_the_digest_of_its_artifact(tracker: Tracker, versions: list[ModelVersion]) -> None:
    assert find_by_sha256(tracker, "m", versions[1].sha256) == versions[1]
    assert find_by_sha256(tracker, "m", "0" * 64) is None
    assert find_by_sha256(tracker, "other", versions[1].sha256) is None


NAME = "tiny-v1.2-grpo"
CARD = Card(text="---\nlicense: apache-2.0\n---\n# A card\n", license_id="Apache-2.0")


@pytest.fixture(scope="module")
def mlflow_model_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("artifact") / "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, mlflow_model_checkpoint: Path, _empty_mlflow_database: Path) -> Home:
    """A home with a chat model that is champion."""
    with new_home(tmp_path_factory.mktemp("made"), _empty_mlflow_database) as home:
        tracker = open_tracker(home)
        package, sha256 = sealed(mlflow_model_checkpoint, CARD)
        package = dataclasses.replace(package, facts={"preset": "tiny"})
        run = tracker.start_run("tiny", "grpo", tags={})
        set_alias(tracker, register_model(run, package, name=NAME, tags={"sha256": sha256}), "champion")
    return home


@pytest.fixture
def champion(made: Home, home: Home) -> ModelVersion:
    copy_home(made, home)
    found = find_version(open_tracker(home), NAME, "champion")
    assert found is not None
    return found


def files_of(home: Home) -> Path:
    """The only model's folder in MLflow's store."""
    (folder,) = (home.mlartifacts / "tiny" / "models").glob("*/artifacts")
    return folder


def test_mlflows_pipeline_answers_as_the_evaluation(champion: ModelVersion, mlflow_model_checkpoint: Path) -> None:
    import mlflow

    chat = mlflow.transformers.load_model(f"models:/{NAME}@champion")
    found = [
        chat(conversation(each), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, return_full_text=False)
        for each in QUESTIONS
    ]
    expected = our_answers(mlflow_model_checkpoint)
    assert [each[0]["generated_text"] for each in found] == [text for _, text in expected]
    lengths = {len(ids) for ids, _ in expected}
    assert len(lengths) > 1  # some end with an EOS id of the generation configuration
    assert chat.model.generation_config.eos_token_id == list(range(1, 262, 3))


def test_pyfunc_answers_messages_greedily(champion: ModelVersion, mlflow_model_checkpoint: Path) -> None:
    import mlflow

    model = mlflow.pyfunc.load_model(f"models:/{NAME}/{champion.version}")
    for question, (ids, text) in zip(QUESTIONS, our_answers(mlflow_model_checkpoint), strict=True):
        (answer,) = model.predict({"messages": conversation(question), "max_tokens": MAX_NEW_TOKENS})
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": text.lstrip()}  # MLflow strips it
        assert answer["usage"]["completion_tokens"] == len(ids)
        assert answer["model"] == NAME


def test_a_version_has_cards_and_no_local_path(champion: ModelVersion, home: Home, tmp_path: Path) -> None:
    folder = files_of(home)
    record: dict[str, Any] = yaml.safe_load((folder / "MLmodel").read_text())
    assert "messages" in record["signature"]["inputs"]
    assert record["metadata"] == {"preset": "tiny", "task": "llm/v1/chat"}
    assert record["model_id"] == champion.model_id
    assert record["model_size_bytes"] > (folder / "model" / "model.safetensors").stat().st_size
    assert json.loads((folder / "serving_input_example.json").read_text())["messages"]
    assert (folder / "model_card.md").read_text() == CARD.text
    assert "Apache-2.0" in (folder / "LICENSE.txt").read_text()
    assert "transformers==" in (folder / "requirements.txt").read_text()
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not [text for text in texts if "/tmp" in text or str(tmp_path.parent) in text]
    assert not list(folder.rglob("*.pkl"))


def test_a_tokenizer_that_mlflow_has_put_apart_is_found(tmp_path: Path) -> None:
    for place in ("model/config.json", "components/tokenizer/tokenizer.json"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("{}")
    (tmp_path / "MLmodel").write_text("flavors: {}")
    assert {path.name for path in checkpoint_in(tmp_path).iterdir()} == {"config.json", "tokenizer.json"}


@pytest.fixture
def model_card_tracker(tracked_home: Home) -> Tracker:
    register_toy(tracked_home)
    return open_tracker(tracked_home)


def version_of(model_card_tracker: Tracker) -> ModelVersion:
    found = find_number(model_card_tracker, "toy-sft", "1")
    assert found is not None
    return found


def description(model_card_tracker: Tracker) -> str:
    return str(model_card_tracker.client.get_model_version("toy-sft", "1").description)


def card_file(home: Home) -> str:
    (path,) = home.mlartifacts.glob("toy/models/*/artifacts/model_card.md")
    return path.read_text()


def test_mlflows_page_shows_the_card(model_card_tracker: Tracker, home: Home) -> None:
    shown = description(model_card_tracker)
    for title in ("Results", "Decision", "Training data", "License", "Intended use", "Limits", "Lineage", "Training"):
        assert f"\n## {title}\n" in shown
    assert shown == body_of(card_file(home))
    assert "The base model's: Apache-2.0." in shown
    assert "`toy-sft` version 1 is the checkpoint of" in shown
    assert 'load_model("models:/toy-sft/1")' in shown and "champion" not in shown.partition("## Decision")[0]


def test_a_card_gets_decision_and_rollback_once(model_card_tracker: Tracker, home: Home) -> None:
    version = version_of(model_card_tracker)
    set_tags(
        model_card_tracker,
        version,
        {"verdict": "Better by *0.2* <b>", "promoted_over": "none", "rolled_back": "too rude"},
    )
    refresh_cards(home, model_card_tracker, [version])
    expected = r"Better by \*0.2\* &lt;b&gt; It became champion. It was rolled back: too rude"
    assert expected in description(model_card_tracker)
    assert expected in card_file(home)
    (path,) = home.mlartifacts.glob("toy/models/*/artifacts/model_card.md")
    path.unlink()
    refresh_cards(home, model_card_tracker, [version])
    assert not path.exists()


def test_the_header_is_one_that_hubs_read(model_card_tracker: Tracker, home: Home) -> None:
    source = f"hub:me/sums@{'a' * 40}"
    (report,) = home.root.glob("artifacts/**/report.json")
    report.write_text(report.read_text().replace("my|sums.jsonl", source))
    records = read_records(home)
    rows, sft = (next(each for each in records if each.ref.kind == kind) for kind in ("dataset", "checkpoint"))
    inputs = {"sft": sft.ref.sha256, "rows": rows.ref.sha256}
    settings = {"confidence": 0.95, "num_sampled_problems": 64}
    evaluated = replace(
        sft,
        ref=replace(sft.ref, kind="evaluation", sha256="e" * 64),
        ingredients={**sft.ingredients, "inputs": inputs, "config": {"evaluation": settings}},
        metrics={
            "eval/problems": 200.0,
            "eval/accuracy": 0.5,
            "eval/accuracy_low": 0.43,
            "eval/accuracy_high": 0.57,
            "eval/pass_at_8": 0.75,
            "completion/length": 9.0,
        },
    )
    written = write_card(home, (*records, evaluated), sft, name="toy-sft", version=1, tags={})
    card = ModelCard(written.text)
    result, sampled = card.data.eval_results or []
    assert card.data.model_name == "toy-sft"
    assert (result.dataset_type, result.dataset_revision, result.dataset_split) == ("me/sums", "a" * 40, "held out")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
    assert result.metric_args == {"n": 200, "interval": [0.43, 0.57], "confidence": 0.95}
    assert (sampled.metric_type, sampled.metric_args) == ("pass_at_8", {"n": 64})
    assert card.data.datasets == ["me/sums"]


def test_a_long_card_is_cut_at_a_line_in_mlflows_page(model_card_tracker: Tracker, home: Home) -> None:
    version = version_of(model_card_tracker)
    set_tags(model_card_tracker, version, {"verdict": "long " * 900})
    refresh_cards(home, model_card_tracker, [version])
    assert len(description(model_card_tracker)) <= 5000
    assert description(model_card_tracker).endswith("(The whole card is the file model_card.md of the model.)")
    assert "## Lineage" in card_file(home)
