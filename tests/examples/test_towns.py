"""The task for a search, its corpus, and demonstrations that search it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlcore.data_contracts.contracts.search_corpus import read_corpus
from rlcore.data_contracts.errors import ContractError
from rlcore.examples import towns


def rows(direct_share: float, count: int = 40) -> list[dict[str, object]]:
    return towns.MADE.demonstrations(random.Random(0), num_train=count, num_eval=4, direct_share=direct_share)


def test_the_corpus_fulfils_its_contract_and_each_town_has_one_passage() -> None:
    passages = towns.passages()
    assert list(passages) == read_corpus(towns.CORPUS)  # what the tool search takes, too
    assert len({text.partition(":")[0] for _, text in passages}) == len(passages) == 1000


def test_a_corpus_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "towns.jsonl"
    changed.write_bytes(towns.CORPUS.read_bytes().replace(b"wells 2", b"wells 3", 1))
    monkeypatch.setattr(towns, "CORPUS", changed)
    with pytest.raises(ContractError, match="was changed"):
        towns.passages.__wrapped__()


def test_an_answer_stands_in_the_passage_of_its_town() -> None:
    _, text = towns.passages()[0]
    town, _, figures = text.partition(": ")
    for figure in figures.removesuffix(".").split(", "):
        name, number = figure.split()
        assert towns.answer(f"{name} in {town}?") == int(number)


def test_a_searched_demonstration_names_the_figure_before_it_answers() -> None:
    question, call, said = rows(0.0)[0]["messages"]
    figure, _, town = question["content"].removesuffix("?").partition(" in ")
    assert call["content"] == f"<tool:search>{town}</tool>"
    assert said["role"] == "tool"
    assert said["content"].startswith(f"{town}: ")
    number = towns.answer(question["content"])
    assert f"{figure} {number}" in said["content"]
    assert rows(0.0)[0]["completion"] == f"{figure} {number} #### {number}"
