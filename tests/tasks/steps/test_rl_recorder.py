"""The sample of an iteration's rollouts that MLflow displays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from rlcore.data_contracts.contracts.rollouts import check_rollouts
from rlcore.data_contracts.errors import ContractError
from rlcore.errors import StorageError
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.tasks.steps.rl_recorder import SAMPLE_ROWS, RolloutKeeper, rollout_rows, write_sample
from rlcore.tasks.steps.rows import read_episodes
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_table
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.types import Message, ScoredRollout
from tests import strategies


def frame(count: int) -> pd.DataFrame:
    """Rollouts of which the second was not scored."""
    return pd.DataFrame(
        [
            {
                "iteration": 3,
                "prompt_id": f"p{number}",
                "sample_index": 0,
                "prompt": "1+1",
                "reference": "2",
                "text": f"text {number}",
                "branch": 0,
                "completion_ids": [1] * (number + 1),
                "value": float("nan") if number == 1 else 0.5,
                "parts": json.dumps({} if number == 1 else {"math": 1.0, "length": -0.5}),
                "finish_reason": "stop",
                "error": "no answer" if number == 1 else "",
            }
            for number in range(count)
        ]
    )


def test_a_sample_has_a_column_for_every_part_and_gaps_where_there_is_none(tmp_path: Path) -> None:
    write_sample(frame(40), tmp_path / "sample.json")
    table = json.loads((tmp_path / "sample.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == SAMPLE_ROWS == 16
    assert (rows[0]["reward"], rows[0]["part/math"], rows[0]["part/length"], rows[0]["tokens"]) == (0.5, 1.0, -0.5, 1)
    assert (rows[1]["reward"], rows[1]["part/math"], rows[1]["error"]) == (None, None, "no answer")
    assert {row["iteration"] for row in rows} == {3}


def forked() -> SampledGroups[list[ScoredRollout]]:
    """The groups of an iteration, in which the first episode of the second group has two branches."""
    found = drawn(1)
    group = found.groups[1]
    group[0] = strategies.forked(group[0], group[1], group[2])
    return found


def test_every_sample_of_an_episode_is_a_row_with_the_reason_of_the_fork() -> None:
    found = forked()
    table = pd.DataFrame(rollout_rows(1, found.groups, replaced=found.replaced))
    check_rollouts(table)
    assert table["branch"].tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0]
    rows, episode = table.iloc[3:6], found.groups[1][0].rollout
    assert rows["fork"].tolist() == ["", "another history", "another history"]
    assert rows["prompt_ids"].tolist() == [list(sample.prompt.token_ids) for sample in episode.samples]
    assert sum(map(sum, rows["loss_mask"])) == episode.num_sampled
    assert rows["value"].nunique() == 1
    assert table["prompt_ids"].map(len).tolist()[6:] == [0] * 5  # no agent wrote these
    back = [tuple(row["completion_ids"]) for row in rows.to_dict("records")]
    assert back == [sample.completion_ids for sample in episode.samples]


def test_readers_of_answers_see_an_episode_once_and_read_tables_of_before(tmp_path: Path) -> None:
    found = forked()
    table = pd.DataFrame(rollout_rows(1, found.groups, replaced=found.replaced))
    write_table(table, tmp_path / "new.parquet")
    episodes = read_episodes(tmp_path / "new.parquet")
    assert episodes["forks"].tolist() == [[]] * 3 + [["another history"] * 2] + [[]] * 5
    write_table(table.drop(columns=["branch", "fork", "calls", "prompt_ids"]), tmp_path / "old.parquet")
    assert read_episodes(tmp_path / "old.parquet")["forks"].tolist() == [[]] * len(table)


def test_mlflow_reads_each_table_once_and_knows_the_newest_hundred(tracked_home: Home, tmp_path: Path) -> None:
    tracker = open_tracker(tracked_home)
    write_sample(frame(2), tmp_path / "first.json")
    with tracker.start_run("e", "r", tags={}) as run:
        for number in range(101):
            path = tmp_path / f"iteration-{number}.json"
            path.write_bytes((tmp_path / "first.json").read_bytes())
            run.log_table(path, "samples")
    resumed = tracker.reopen_run(run.run_id)
    assert resumed is not None
    resumed.log_table(tmp_path / "iteration-100.json", "samples")  # a second time after a resume
    tag = tracker.client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"]
    paths = [entry["path"] for entry in json.loads(tag)]
    assert len(tag) < 8000  # MLflow's limit
    assert paths == [f"samples/iteration-{number}.json" for number in range(1, 101)]
    shown = tracker.client.load_table(run.experiment_id, "samples/iteration-100.json", run_ids=[run.run_id])
    assert list(shown["prompt_id"]) == ["p0", "p1"]


def drawn(iteration: int) -> SampledGroups[list[ScoredRollout]]:
    """Two groups, and one that gave way to the second."""
    kept, other, replaced = (
        [_asked(item) for item in group] for group in strategies.random_groups(strategies.tiny_llama(), iteration)
    )
    return SampledGroups(groups=(kept, other), replaced=(replaced,))


def test_what_was_replaced_stands_in_the_rollout_table_beside_what_was_trained_on() -> None:
    found = drawn(1)
    table = pd.DataFrame(rollout_rows(1, found.groups, replaced=found.replaced))
    check_rollouts(table)
    assert table["replaced"].tolist() == [False] * 6 + [True] * 3
    assert set(table[table["replaced"]]["prompt_id"]) == {found.replaced[0][0].rollout.prompt.prompt_id}
    assert not table.duplicated(["prompt_id", "sample_index"]).any()


def _asked(item: ScoredRollout) -> ScoredRollout:
    prompt = dataclasses.replace(item.rollout.prompt, messages=(Message(role="user", content="1+1"),))
    return dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, prompt=prompt))


def test_iterations_written_together_are_the_same_files(tracked_home: Home, tmp_path: Path) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("e", "r", tags={}) as run:
        together, alone = (RolloutKeeper(tmp_path / name, run) for name in ("together", "alone"))
        for iteration in (1, 2, 3):
            together.keep(iteration, drawn(iteration))
            assert not list(together.folder.iterdir())  # five seconds are not over
            alone.keep(iteration, drawn(iteration))
            alone.write()
        together.write()
        together.write()  # nothing waits any more
    files = sorted(path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.*"))
    assert [file.name for file in files] == [
        f"iteration-0000{n}.{kind}" for kind in ("parquet", "parquet", "json") for n in (1, 2, 3)
    ]  # tables, their digests and samples
    for file in files:
        assert (tmp_path / "together" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()
    assert len(pd.read_parquet(tmp_path / "alone" / files[0])) == sum(map(len, (*drawn(1).groups, *drawn(1).replaced)))
    assert len(tracker.client.list_artifacts(run.run_id, "samples")) == 3


def test_a_table_that_has_changed_since_it_was_written_stops_the_stage(tracked_home: Home, tmp_path: Path) -> None:
    with open_tracker(tracked_home).start_run("e", "r", tags={}) as run:
        keeper = RolloutKeeper(tmp_path, run)
        keeper.keep(1, drawn(1))
        keeper.write()
        run.flush()
        again = RolloutKeeper(tmp_path, run)  # of a later attempt
        again.require_intact()
        (table,) = again.folder.iterdir()
        table.write_bytes(table.read_bytes()[:-1])
        with pytest.raises(StorageError, match="digest mismatch") as caught:
            again.require_intact()
    assert (caught.value.where, f"delete {tmp_path}" in caught.value.fix) == (str(table), True)


def test_rollouts_that_break_the_contract_are_refused_and_not_written(tracked_home: Home, tmp_path: Path) -> None:
    spoilt = drawn(1)
    first = spoilt.groups[0][0]
    rollout = dataclasses.replace(first.rollout, sampler_logprobs=(0.5, *first.rollout.sampler_logprobs[1:]))
    spoilt.groups[0][0] = dataclasses.replace(first, rollout=rollout)
    with open_tracker(tracked_home).start_run("e", "r", tags={}) as run:
        keeper = RolloutKeeper(tmp_path, run)
        keeper.keep(1, spoilt)
        with pytest.raises(ContractError, match="must be finite and at most 0"):
            keeper.write()
        keeper.write()  # on the way out there is nothing left to stumble over
        assert not list(keeper.folder.iterdir())
