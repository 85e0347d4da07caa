"""Stages that accept or reject data and rewards: data, reward_gate, drift and rejection."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlcore.data_contracts.drift.sketches import sketch
from rlcore.errors import DataError, NonFiniteError, RewardError, StorageError
from rlcore.sampling.rejection import REASONS, Candidate, Selection
from rlcore.tasks.kinds.data.sampled_step import pair_of
from rlcore.tasks.kinds.data.step import _refuse_leaks, evaluated_prompts
from rlcore.tasks.kinds.drift.page import render as drift_page
from rlcore.tasks.kinds.drift.step import compare_snapshots
from rlcore.tasks.kinds.rejection.step import demonstration, require_enough
from rlcore.tasks.kinds.reward_gate.kind import render as reward_gate_page
from rlcore.tasks.kinds.reward_gate.step import _champions_own, _decision, _unseen, compared, margins_table
from rlcore.tasks.presets.data import ComparisonConfig, DatasetConfig
from rlcore.tasks.presets.settings import DriftConfig, RetrainConfig
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import PairRow
from rlcore.tasks.steps.sampled_answers import is_usable, refuse_failing_grader
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, read_table, write_json, write_table
from rlcore.tasks.tracking.lineage import SEEN_DIGITS
from rlcore.types import Message, Prompt, Rollout, Score, ScoredRollout
from tests import strategies


def snapshot(folder: Path, *, train: list[str], held_out: list[str]) -> Path:
    for split, questions in (("train", train), ("eval", held_out)):
        rows = [
            {
                "prompt_id": f"{split}-{place}",
                "messages": [{"role": "user", "content": question}],
                "reference": "1",
                "task": "sums",
                "split": split,
            }
            for place, question in enumerate(questions)
        ]
        write_table(pd.DataFrame(rows), folder / f"{split}.parquet")
    return folder


def test_evaluation_prompts_that_an_earlier_data_set_trains_on_are_refused_by_name(tmp_path: Path) -> None:
    first = snapshot(tmp_path / "first", train=["1+1", "1+2"], held_out=["1+3"])
    clean = snapshot(tmp_path / "clean", train=["2+1"], held_out=["2+2"])
    leaking = snapshot(tmp_path / "leaking", train=["2+1"], held_out=["1 + 2 ?", "2+2"])
    settings = SimpleNamespace(data={"second": dataset("prompts")})
    context: Any = SimpleNamespace(folder=clean, inputs={"prepare_first": first}, config=settings)
    _refuse_leaks(context, "second", ("prepare_first",))
    assert len(evaluated_prompts(context, ("prepare_first",))) == 1
    context.folder = leaking
    with pytest.raises(DataError, match=r"1 evaluation prompts .* \(prepare_first\); .*1 \+ 2(?s:.*)data\.second"):
        _refuse_leaks(context, "second", ("prepare_first",))
    settings.data["second"] = dataset("prompts", compare="exact")
    _refuse_leaks(context, "second", ("prepare_first",))
    settings.data["second"] = dataset("reasoning_gym")  # whose puzzles are made of signs
    _refuse_leaks(context, "second", ("prepare_first",))


def test_evaluation_prompts_that_share_words_with_an_earlier_data_set_are_refused(tmp_path: Path) -> None:
    words = " ".join(f"w{place}" for place in range(10))
    first = snapshot(tmp_path / "first", train=[f"Say {words}, please"], held_out=["1+3"])
    second = snapshot(tmp_path / "second", train=["2+1"], held_out=[f"{words}?", "2+2"])
    settings = SimpleNamespace(data={"second": dataset("prompts")})
    context: Any = SimpleNamespace(folder=second, inputs={"prepare_first": first}, config=settings)
    _refuse_leaks(context, "second", ("prepare_first",))
    for action in ("quarantine", "refuse"):
        settings.data["second"] = dataset("prompts", ngram_overlap=action)
        with pytest.raises(DataError, match=r"1 evaluation prompts share 13 words .* \(prepare_first\)"):
            _refuse_leaks(context, "second", ("prepare_first",))


def dataset(adapter: str, **changes: Any) -> DatasetConfig:
    comparison = ComparisonConfig(**changes)
    return DatasetConfig(
        contract="prompts", adapter=adapter, num_train=2, num_eval=1, max_tokens=9, comparison=comparison
    )


def group(*texts: str) -> list[Rollout]:
    prompt = Prompt(
        prompt_id="q", messages=(Message(role="user", content="1+1"),), token_ids=(1,), reference="2", task="t"
    )
    return [
        Rollout(
            prompt=prompt,
            completion_ids=(5,),
            sampler_logprobs=(-0.1,),
            loss_mask=(True,),
            policy_version=0,
            finish_reason="stop",
            text=text,
        )
        for text in texts
    ]


class Equals:
    """Right where the text is the reference; a question mark cannot be judged."""

    name = "equals"

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        return [
            Score(value=None, terms={}, error="?")
            if rollout.text == "?"
            else Score(value=float(rollout.text == rollout.prompt.reference), terms={})
            for rollout in rollouts
        ]


def test_the_first_right_answer_is_chosen_over_the_first_wrong_one_both_with_the_prefill_of_the_template() -> None:
    pair = pair_of(group("3", "2", "4", "2"), Equals(), "<think>\n")
    assert pair is not None
    assert (pair["chosen"], pair["rejected"]) == ("<think>\n2", "<think>\n3")
    assert (pair["pair_id"], pair["source"]) == ("q", "policy")


@pytest.mark.parametrize("texts", ["22", "2?", "3?"])
def test_a_group_of_one_kind_gives_no_pair_and_what_could_not_be_judged_is_of_none(texts: str) -> None:
    assert pair_of(group(*texts), Equals(), "") is None


def test_a_reward_model_must_reach_its_accuracy_agree_with_the_last_and_not_lose_to_it() -> None:
    settings = RetrainConfig(min_accuracy=0.8, min_agreement=0.8, accuracy_margin=0.05)
    right, each = np.ones(100), range(100)
    passed = compared([right, right], each, settings)
    assert [check.passed for check in passed] == [True, True, True]
    # Clopper and Pearson at 95 %, 100 of 100: low = 0.025^(1/100) = 0.9638.
    assert passed[0].low == pytest.approx(0.9638, abs=5e-5)
    wrong = right.copy()
    wrong[:30] = -1.0
    lost = compared([wrong, right], each, settings)
    assert [check.passed for check in lost] == [False, False, False]
    assert lost[2].estimate == pytest.approx(-0.3)
    other = np.concatenate([-right[:50], right[50:]]), np.concatenate([right[:50], -right[50:]])
    apart = compared(list(other), each, RetrainConfig(min_accuracy=0.3, accuracy_margin=0.5))
    assert [check.passed for check in apart] == [True, False, True]  # as accurate, and of another opinion
    assert len(compared([right], each, settings)) == 1


def test_a_few_equal_pairs_rule_no_loss_out_and_the_page_says_how_many_would() -> None:
    loss = compared([np.ones(5), np.ones(5)], range(5), RetrainConfig(accuracy_margin=0.05))[2]
    assert not loss.passed
    assert loss.low == pytest.approx(-0.434, abs=1e-3)  # z² / (n + z²)
    assert loss.sentence.endswith("not enough pairs: at least 72 are needed")


def test_pairs_of_one_ranked_list_are_no_proof_by_their_number() -> None:
    """600 pairs of 100 prompts, none different: nobody knows whether the six of a prompt go together, so 100 count."""
    settings = RetrainConfig(accuracy_margin=0.02)
    prompts = np.repeat(np.arange(100), 6).tolist()
    assert compared([np.ones(600)] * 2, range(600), settings)[2].passed
    assert not compared([np.ones(600)] * 2, prompts, settings)[2].passed


def test_a_tie_that_was_right_is_lost_and_one_that_was_wrong_is_not_won() -> None:
    new, old = np.array([0.0, 0.0, 1.0, -1.0, 0.0]), np.array([1.0, -1.0, -1.0, 1.0, 0.0])
    # lost: the first and the fourth; won: the third. The constant model is no better than its ties.
    assert compared([new, old], range(5), RetrainConfig())[2].estimate == pytest.approx(-1 / 5)


@pytest.mark.slow  # tests/rlcore/evaluation has the exact tests
@pytest.mark.parametrize(("num_prompts", "together"), [(100, 1), (100, 4)])
def test_a_loss_of_exactly_the_margin_passes_no_more_often_than_the_level(num_prompts: int, together: int) -> None:
    """5 % of the pairs are won and 10 % lost, where the margin is 5 points: 2.5 % of the tries may pass.

    Pairs of one prompt share their outcome in half of the prompts.
    """
    generator, settings = np.random.default_rng(0), RetrainConfig(accuracy_margin=0.05)
    prompts, tries, passed = np.repeat(np.arange(num_prompts), together).tolist(), 500, 0
    for _ in range(tries):
        one, own = generator.random((num_prompts, 1)), generator.random((num_prompts, together))
        place = np.where(generator.random((num_prompts, 1)) < 0.5, one, own).ravel()
        new, old = np.where(place < 0.1, -1.0, 1.0), np.where((place >= 0.1) & (place < 0.15), -1.0, 1.0)
        passed += compared([new, old], prompts, settings)[2].passed
    assert passed / tries < 0.025 + 2.6 * (0.025 * 0.975 / tries) ** 0.5  # a right level fails here once in 200


def row(name: str) -> PairRow:
    return PairRow(
        pair_id=name,
        set_id=name,
        messages=(Message(role="user", content=f"question {name}"),),
        chosen=f"good {name}",
        rejected="bad | worse",
        margin=0.0,
        probability=1.0,
        weight=1.0,
        source="test",
    )


def test_the_page_shows_the_pairs_on_which_the_two_disagree_the_furthest_apart_first() -> None:
    settings = RetrainConfig()
    new, old = np.array([1.0, -2.0, 1.0, -0.5]), np.array([1.0, 2.0, 1.0, 0.5])
    rows = [row(name) for name in "abcd"]
    page = reward_gate_page(
        _decision(compared([new, old], range(4), settings), settings), margins_table(rows, [new, old]), is_same=False
    )
    assert page.index("| b | good b | bad \\| worse | -2.00 | +2.00 |") < page.index("| d | good d")
    assert "2 of 4." in page
    assert "| a |" not in page


def test_a_reward_model_without_numbers_passes_no_gate() -> None:
    for margins in ([np.full(100, np.nan)], [np.ones(100), np.full(100, np.inf)]):
        with pytest.raises(NonFiniteError, match="100 margins"):
            compared(margins, range(100), RetrainConfig())


def test_pairs_that_the_previous_model_was_trained_on_are_left_out(tmp_path: Path) -> None:
    rows = [row("a"), row("b")]
    known = sorted(each[:SEEN_DIGITS] for each in prompt_hashes(rows[:1]))
    write_table(pd.DataFrame({"prompt": known}), tmp_path / "prompts.parquet")
    assert _unseen(rows, []) == rows
    assert _unseen(rows, [tmp_path / "prompts.parquet"]) == rows[1:]
    with pytest.raises(DataError, match="every held-out pair"):
        _unseen(rows[:1], [tmp_path / "prompts.parquet"])


def test_the_gate_refuses_without_seen_prompts_or_champion(tracked_home: Home, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read the file") as caught:
        _unseen([row("a")], [tmp_path / "gone" / "prompts.parquet"])
    assert caught.value.where.endswith("gone/prompts.parquet")
    with pytest.raises(DataError, match="neither in this state directory nor a version of retrain-reward_model"):
        _champions_own("retrain-reward_model", "e" * 64, tmp_path)


CALM, MOVED = "a" * 64, "b" * 64


def reported(folder: Path, digest: str, sketches: dict[str, Any]) -> Path:
    folder.mkdir()
    write_json({"digest": digest, "sketches": sketches}, folder / "report.json")
    return folder


def drift_snapshot(folder: Path, digest: str, sources: list[str], lengths: list[int]) -> Path:
    frame = pd.DataFrame({"source": sources, "chosen_tokens": lengths, "rejected_tokens": lengths})
    return reported(folder, digest, sketch(frame))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    before = drift_snapshot(tmp_path / "before", CALM, ["web"] * 300 + ["book"] * 100, [20] * 400)
    after = drift_snapshot(tmp_path / "after", MOVED, ["web"] * 100 + ["we|b"] * 300, [20] * 200 + [200] * 200)
    return before, after


def test_the_page_names_each_column_that_moved_and_how(folders: tuple[Path, Path]) -> None:
    before, after = folders
    found = compare_snapshots("prepare_preferences", after, before, DriftConfig())
    assert found.level == "refuse"
    page = drift_page([found])
    assert "## preferences: refuse" in page
    assert "| source | **refuse** |" in page
    assert "we\\|b 0.0% → 75.0%; web 75.0% → 25.0%; book 25.0% → 0.0%" in page
    # 400 of 20 tokens, then 200 of 20 and 200 of 200: mean 110, half of the rows move from one bin to another.
    assert "| chosen_tokens | **refuse** |" in page
    assert "| 0.500 |" in page
    assert "20.0 → 110.0" in page
    assert "| chosen_is | calm | 0.000 |" in page


def test_rows_that_a_person_has_accepted_warn_and_pass(folders: tuple[Path, Path]) -> None:
    before, after = folders
    accepted = DriftConfig(accepted=(MOVED[:12],))
    found = compare_snapshots("prepare_preferences", after, before, accepted)
    assert (found.level, found.is_excused) == ("warn", True)
    assert "accepted by a person" in drift_page([found])
    assert compare_snapshots("prepare_preferences", before, after, accepted).level == "refuse"


def test_the_same_rows_are_calm(folders: tuple[Path, Path]) -> None:
    found = compare_snapshots("prepare_prompts", folders[0], folders[0], DriftConfig())
    assert found.level == "calm"
    assert "the accepted rows, unchanged" in drift_page([found])


def test_rows_without_a_comparison_need_a_person(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """No accepted data of that name, an account without columns, columns that are gone or are counted otherwise."""
    before, _ = folders
    kept = read_json(before / "report.json")["sketches"]
    empty = reported(tmp_path / "empty", "0" * 64, {})
    fewer = reported(tmp_path / "fewer", "1" * 64, {name: kept[name] for name in kept if name != "source"})
    other = reported(tmp_path / "other", "2" * 64, kept | {"chosen_tokens": {**kept["chosen_tokens"], "edges": [1, 2]}})
    pairs = [(before, None), (before, empty), (fewer, before), (other, before)]
    given = ["trained on no data of that name", "no column can be compared", "source (cannot", "(cannot be compared)"]
    for (new, accepted), words in zip(pairs, given, strict=True):
        found = compare_snapshots("prepare_preferences", new, accepted, DriftConfig())
        assert found.level == "refuse"
        assert words in drift_page([found])
        excused = DriftConfig(accepted=(found.new[:12],))
        assert compare_snapshots("prepare_preferences", new, accepted, excused).level == "warn"
    with pytest.raises(StorageError) as caught:
        compare_snapshots("prepare_preferences", before, tmp_path / "gone", DriftConfig())
    assert "gone" in caught.value.where


def test_a_new_column_is_named_and_stops_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept = read_json(folders[0] / "report.json")["sketches"]
    fewer = reported(tmp_path / "fewer", "1" * 64, {name: kept[name] for name in kept if name != "source"})
    found = compare_snapshots("prepare_preferences", folders[0], fewer, DriftConfig())
    assert (found.level, found.left_out) == ("calm", ("source",))
    assert "the accepted rows have none: source" in drift_page([found])


def test_many_sources_without_drift_pass_and_pairs_of_one_prompt_do_not_count_as_many(tmp_path: Path) -> None:
    """60 equally likely sources; each prompt has ten pairs, which share source and lengths. 12 pairs of datasets."""
    generator = np.random.default_rng(0)
    for number in range(12):
        folders = []
        for side in ("old", "new"):
            sources, lengths = generator.integers(0, 60, 400), generator.geometric(0.02, 400)
            rows = {"source": sources.astype(str), "chosen_tokens": lengths, "rejected_tokens": lengths[::-1]}
            frame = pd.DataFrame({"prompt_hash": np.arange(400).astype(str), **rows}).loc[np.repeat(range(400), 10)]
            name = f"{side} {number}"
            folders.append(reported(tmp_path / name, name, sketch(frame.reset_index(drop=True))))
        assert compare_snapshots("prepare_preferences", folders[1], folders[0], DriftConfig()).level == "calm"


def candidate(prompt_id: str, text: str = "Easy.</think>2") -> Candidate:
    return Candidate(
        prompt_id=prompt_id,
        task="sums",
        sample_index=3,
        text=text,
        num_tokens=4,
        value=1.0,
        is_finished=True,
        is_usable=True,
    )


def test_a_demonstration_begins_with_what_the_template_put_into_the_assistants_mouth() -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="1+1"))
    prompt = Prompt(prompt_id="q", messages=messages, token_ids=(1,), reference="2", task="sums")
    assert demonstration(prompt, candidate("q"), "<think>\n") == {
        "demonstration_id": "q/3",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}],
        "completion": "<think>\nEasy.</think>2",
        "reference": "2",
        "task": "sums",
    }


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("#### 2", True),
        (" \n", False),
        ("", False),
        ("2<|im_end|>", False),
        ("a\0b", False),
        ("<|im_", True),
        ("\x15\ufffd", False),
    ],
)
def test_a_text_that_the_contract_would_refuse_is_not_usable(text: str, usable: bool) -> None:
    assert is_usable(text, ("<|im_start|>", "<|im_end|>")) is usable


def test_the_calls_of_a_kept_episode_are_turns_before_its_answer() -> None:
    prompt = Prompt(
        prompt_id="q", messages=(Message(role="user", content="1+1"),), token_ids=(1,), reference="2", task="sums"
    )
    kept = dataclasses.replace(candidate("q", "#### 2"), calls=(("<tool:calculator>1+1</tool>", "2"),))
    for role in ("tool", "user"):
        row = demonstration(prompt, kept, "", tool_role=role)
        assert row["messages"] == [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "<tool:calculator>1+1</tool>"},
            {"role": role, "content": "2"},
        ]
        assert row["completion"] == "#### 2"


def test_too_few_kept_answers_are_an_error_that_says_where_they_went() -> None:
    dropped = dict.fromkeys(REASONS, 0) | {"below_threshold": 7, "truncated": 1}
    with pytest.raises(DataError, match=r"kept 2 of 10 answers: 1 truncated, 7 below_threshold") as caught:
        require_enough(
            Selection(kept=(candidate("a"), candidate("a", "other")), dropped=dropped), 10, where="stages.kept"
        )
    assert "num_samples" in caught.value.fix
    require_enough(Selection(kept=(candidate("a"), candidate("b")), dropped=dropped), 10, where="stages.kept")


def asked(item: ScoredRollout) -> ScoredRollout:
    """The rollout of a prompt with words."""
    prompt = replace(item.rollout.prompt, messages=(Message(role="user", content="1+1"),))
    return replace(item, rollout=replace(item.rollout, prompt=prompt))


def test_a_grader_that_fails_leaves_the_rollouts_that_it_failed_on(tmp_path: Path) -> None:
    chunk = tmp_path / "chunks" / "chunk-00000.parquet"
    good, bad = (asked(strategies.scored_rollout(value)) for value in (1.0, None))
    refuse_failing_grader([[good] * 19, [bad]], chunk)
    assert not list(tmp_path.iterdir())
    groups: list[list[ScoredRollout]] = [[good, bad]]
    with pytest.raises(RewardError, match="1 of 2 rollouts could not be scored") as caught:
        refuse_failing_grader(groups, chunk)
    assert not chunk.exists()
    assert read_table(Path(caught.value.where))["error"].tolist() == ["", bad.score.error]
