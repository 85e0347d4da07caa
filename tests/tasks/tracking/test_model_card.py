"""Cards of registered models: what stands in them, when, and that a name is no Markdown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.model_card import body_of, refresh_cards, write_cards
from rlcore.tasks.tracking.registry import ModelVersion, find_number, set_tags
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import register_toy


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    register_toy(tracked_home)
    return open_tracker(tracked_home)


def version_of(tracker: Tracker) -> ModelVersion:
    found = find_number(tracker, "toy-sft", "1")
    assert found is not None
    return found


def description(tracker: Tracker) -> str:
    return str(tracker.client.get_model_version("toy-sft", "1").description)


def card_file(home: Home) -> str:
    (path,) = home.mlartifacts.glob("toy/models/*/artifacts/model_card.md")
    return path.read_text()


def test_mlflows_page_shows_the_card(tracker: Tracker, tracked_home: Home) -> None:
    shown = description(tracker)
    for title in ("Results", "Decision", "Training data", "License", "Intended use", "Limits", "Lineage", "Training"):
        assert f"\n## {title}\n" in shown
    assert shown == body_of(card_file(tracked_home))
    assert "The base model's: Apache-2.0." in shown
    assert "`toy-sft` version 1 is the checkpoint of" in shown
    assert 'load_model("models:/toy-sft/1")' in shown and "champion" not in shown.partition("## Decision")[0]


def test_a_verdict_and_a_roll_back_are_added_and_a_repeated_call_writes_nothing(
    tracker: Tracker, tracked_home: Home
) -> None:
    version = version_of(tracker)
    set_tags(tracker, version, {"verdict": "Better by *0.2* <b>", "promoted_over": "none", "rolled_back": "too rude"})
    refresh_cards(tracked_home, tracker, [version])
    expected = r"Better by \*0.2\* &lt;b&gt; It became champion. It was rolled back: too rude"
    assert expected in description(tracker)
    assert expected in card_file(tracked_home)
    (path,) = tracked_home.mlartifacts.glob("toy/models/*/artifacts/model_card.md")
    path.unlink()
    refresh_cards(tracked_home, tracker, [version])
    assert not path.exists()


def test_a_version_that_awaits_an_approval_says_so(tracker: Tracker, tracked_home: Home) -> None:
    version = version_of(tracker)
    set_tags(tracker, version, {"verdict": "Promoted: better.", "awaits": "ab"})
    refresh_cards(tracked_home, tracker, [version])
    assert "Promoted: better. It awaits an approval." in description(tracker)


def test_the_card_of_a_reward_model_says_how_to_load_one(tracker: Tracker, tracked_home: Home) -> None:
    records = read_records(tracked_home)
    sft = next(each for each in records if each.ref.kind == "checkpoint")
    scorer = replace(sft, ref=replace(sft.ref, kind="reward_model"))
    cards = [write_cards(tracked_home, records, each, name="m", version=3, tags={}).model for each in (sft, scorer)]
    assert ["mlflow.transformers.load_model" in card for card in cards] == [True, False]
    assert ["mlflow.pyfunc.load_model" in card for card in cards] == [False, True]
    assert all('load_model("models:/m/3")' in card for card in cards)


def test_the_header_has_results_data_sets_and_base_as_hubs_read_them(tracker: Tracker, tracked_home: Home) -> None:
    source = f"hub:me/sums@{'a' * 40}"
    (report,) = tracked_home.root.glob("artifacts/**/report.json")
    report.write_text(report.read_text().replace("my|sums.jsonl", source))
    records = read_records(tracked_home)
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
    written = write_cards(tracked_home, (*records, evaluated), sft, name="toy-sft", version=1, tags={})
    card = ModelCard(written.model)
    result, sampled = card.data.eval_results or []
    assert card.data.model_name == "toy-sft"
    assert (result.dataset_type, result.dataset_revision, result.dataset_split) == ("me/sums", "a" * 40, "held out")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
    assert result.metric_args == {"n": 200, "interval": [0.43, 0.57], "confidence": 0.95}
    assert (sampled.metric_type, sampled.metric_args) == ("pass_at_8", {"n": 64})
    assert card.data.datasets == ["me/sums"]


def test_a_long_card_is_cut_at_a_line_in_mlflows_page(tracker: Tracker, tracked_home: Home) -> None:
    version = version_of(tracker)
    set_tags(tracker, version, {"verdict": "long " * 900})
    refresh_cards(tracked_home, tracker, [version])
    assert len(description(tracker)) <= 5000
    assert description(tracker).endswith("(The whole card is the file model_card.md of the model.)")
    assert "## Lineage" in card_file(tracked_home)
