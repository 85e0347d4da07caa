from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlcore.config import RewardTerm
from rlcore.rewards import REWARDS, RewardResources, build_rewards
from rlcore.strict_config import build
from rlcore.types import Rollout

ROOT = Path(__file__).parents[3]
RESOURCES = RewardResources(score_tokens={"reward_model": lambda items, *, calibrated: torch.zeros(1, len(items))})


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def terms(page: str) -> list[list[RewardTerm]]:
    documents = [tomllib.loads(block) for block in blocks(page, "toml")]
    found = [document.get("stages", {}).get("grpo", document).get("rewards", []) for document in documents]
    return [[build(RewardTerm, term) for term in rewards] for rewards in found if rewards]


@pytest.mark.parametrize("page", ["README.md", "docs/rewards.md"])
def test_every_reward_of_a_page_can_be_built_and_its_function_run(
    page: str, make_rollout: Callable[..., Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in blocks(page, "python") if "def brief" in block]
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    for rewards in terms(page):
        build_rewards(rewards, resources=RESOURCES).close()
    (own,) = [rewards for rewards in terms(page) if rewards[-1].kind == "my_rewards:brief"]
    with build_rewards(own, resources=RESOURCES) as reward:
        scores = reward([make_rollout("7", "7"), make_rollout("so " * 99 + "7", "7")])
    assert [score.value for score in scores] == [1.2, 1.0]


def test_the_page_has_every_reward_with_every_option() -> None:
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    shown = {term.kind for rewards in terms("docs/rewards.md") for term in rewards}
    assert set(REWARDS) <= shown
    absent = [
        f"{kind}.{name}"
        for kind, entry in REWARDS.items()
        for name in entry.options.__dataclass_fields__
        if not re.search(rf"\b{name}\b", text)
    ]
    assert absent == []
