"""What a champion was made from, and whether the present inputs are the same.

The last accepted data are those that the champion was trained on. They follow from its lineage, so a promotion accepts
data, a refusal does not, and a roll-back takes the acceptance back; there is no second account to keep in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tasks.home.artifacts import ArtifactRef
from tasks.home.cache import Ingredients
from tasks.home.settings import Home
from tasks.home.storage import read_json
from tasks.pipeline.keys import key_of
from tasks.pipeline.pages import page_folder
from tasks.tracking import registry
from tasks.tracking.lineage import Ancestor, ancestry, read_records
from tasks.tracking.registry import ModelVersion
from tasks.tracking.runs import open_tracker

Result = Literal["unchanged", "judged"]


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """The outcome of a retraining: nothing to do, or a verdict. ``page``: Markdown; ``outcome``: a sentence."""

    result: Result
    outcome: str
    page: str
    refs: Mapping[str, ArtifactRef]


@dataclass(frozen=True, kw_only=True)
class Past:
    """What a champion was made from: the nearest artifact of each stage by name, and the digest of its recipe.

    Empty where this home has no record of it: it was trained elsewhere, or the home has been cleaned.
    """

    artifacts: Mapping[str, str]
    recipe: str

    @property
    def datasets(self) -> dict[str, str]:
        """The accepted snapshots: digests of artifacts by the name of their stage."""
        return {name: sha256 for name, sha256 in self.artifacts.items() if name.startswith("prepare_")}


def past_of(home: Home, champion: ModelVersion) -> Past:
    """What the champion was made from, by the records of this home."""
    stage_key = registry.read_tags(open_tracker(home), champion).get("stage_key")
    records = read_records(home)
    record = next((each for each in records if each.key == stage_key), None)
    if record is None:
        return Past(artifacts={}, recipe="")
    return Past(artifacts=nearest(ancestry(home, records, record)), recipe=recipe_of(home, record.ingredients))


def nearest(root: Ancestor) -> dict[str, str]:
    """The artifact of each stage that is the fewest steps above ``root``, by the stage's name."""
    found: dict[str, str] = {}
    level: tuple[Ancestor, ...] = (root,)
    while level:
        for node in level:
            found.setdefault(node.stage, node.sha256)
        level = tuple(parent for node in level for parent in node.parents)
    return found


def recipe_of(home: Home, ingredients: Ingredients) -> str:
    """Digest of everything that an RL run is made from, except its starting checkpoint.

    Datasets count by the digest of their rows: a copy of the same rows under another name is the same data. The machine
    does not count: another machine's rounding is no reason to continue the training of a champion.
    """
    arguments = dict(ingredients["arguments"])
    start = arguments.pop("start")
    if arguments.get("reference") == start:  # a run that measures KL to its start does so from a champion, too
        del arguments["reference"]
    inputs = {name: _content(home, name, sha) for name, sha in ingredients["inputs"].items() if name != start}
    return key_of({**ingredients, "inputs": inputs, "arguments": arguments, "machine": {}})


def _content(home: Home, stage: str, sha256: str) -> str:
    path = home.artifacts / "dataset" / sha256 / "report.json"
    return str(read_json(path)["digest"]) if stage.startswith("prepare_") and path.is_file() else sha256


def page_of(home: Home, preset: str, refs: Mapping[str, ArtifactRef]) -> str:
    """The pages of a retraining's stages, as far as they were drawn under that name: drift, reward model, verdict."""
    files = {"drift": "drift.md", "reward_gate": "reward_gate.md", "promote": "verdict.md"}
    folders = {stage: page_folder(home, preset, stage, refs[stage]) for stage in files if stage in refs}
    paths = [folder / files[stage] for stage, folder in folders.items()]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
