from __future__ import annotations

from rlcore.tasks.run.retrain import nearest, recipe_of
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json
from rlcore.tasks.tracking.lineage import Ancestor


def node(stage: str, sha256: str, *parents: Ancestor) -> Ancestor:
    return Ancestor(stage=stage, sha256=sha256, facts=(), parents=parents)


def test_the_nearest_result_of_each_stage_counts() -> None:
    old = node(
        "grpo", "g1", node("prepare_prompts", "p1"), node("reward_model", "r1", node("prepare_preferences", "d1"))
    )
    new = node("grpo", "g2", node("champion", "c1", old), node("reward_model", "r2", node("prepare_preferences", "d2")))
    assert nearest(new) == {
        "grpo": "g2",
        "champion": "c1",
        "reward_model": "r2",
        "prepare_preferences": "d2",
        "prepare_prompts": "p1",
    }


def test_a_recipe_is_all_but_the_start_and_data_count_by_their_rows(home: Home) -> None:
    for name, digest in (("s1", "d1"), ("s2", "d1"), ("s3", "d3")):
        folder = home.artifacts / "dataset" / name
        folder.mkdir(parents=True)
        write_json({"digest": digest}, folder / "report.json")

    def recipe(data: str, start: str, start_sha: str, seed: int = 0) -> str:
        inputs = {start: start_sha, "prepare_prompts": data, "reward_model": "r"}
        return recipe_of(home, {"arguments": {"start": start, "section": "grpo"}, "inputs": inputs, "seed": seed})

    first = recipe("s1", "sft", "x")
    assert recipe("s1", "champion", "y") == first
    assert recipe("s2", "champion", "z") == first
    assert recipe("s3", "champion", "z") != first
    assert recipe("s1", "champion", "y", seed=1) != first
    assert recipe("gone", "sft", "x") != first
