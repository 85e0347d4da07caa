from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.config import HardwareConfig, to_dict
from rlcore.errors import ModelError
from rlcore.hardware.machine import find_machine
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import describe_machine
from rlcore.tasks.store.environment import pins_digest
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import find_lineage, tree_text
from tests.toys import ToyConfig, no_sections


def hardware(config: RunConfig) -> Sections:
    return sections_of(config, "hardware")


def rows_digest(config: Sections) -> str:
    return "f" * 64


def rows(context: StageContext) -> StageResult:
    report = {"contract": "prompts/v1", "source": "sums.jsonl", "digest": "d" * 64}
    (context.folder / "report.json").write_text(json.dumps(report))
    return StageResult(metrics={}, rows=12)


def train(context: StageContext) -> StageResult:
    (context.folder / "model").mkdir()
    (context.folder / "model" / "config.json").write_text(json.dumps(sorted(context.inputs)))
    return StageResult(metrics={})


def iterate(context: StageContext) -> StageResult:
    return dataclasses.replace(train(context), rows=4)


ROWS = Stage(name="rows", version=1, kind="dataset", run=rows, sections=no_sections, source_digest=rows_digest)
SFT = Stage(name="sft", version=1, kind="checkpoint", run=train, sections=hardware, inputs=("rows",), registered_as="1")
GRPO = Stage(
    name="grpo", version=1, kind="policy", run=iterate, sections=hardware, inputs=("sft", "rows"), registered_as="2"
)


@pytest.fixture
def refs(tracked_home: Home) -> Mapping[str, ArtifactRef]:
    config = ToyConfig.run()
    return run_pipeline([ROWS, SFT, GRPO], config, ["grpo"], home=tracked_home, experiment="toy")


def test_a_model_is_traced_to_the_digest_of_its_rows(tracked_home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    tags, root = find_lineage(tracked_home, "toy-2/1")
    assert (root.stage, root.sha256) == ("grpo", refs["grpo"].sha256)
    sft, data = root.parents
    assert (sft.stage, data.stage) == ("sft", "rows")
    assert sft.parents == (data,)
    assert data.facts[:4] == ("12 rows", f"source {'f' * 12}", "prompts/v1 from sums.jsonl", f"rows' digest {'d' * 12}")
    assert (tags["preset"], tags["parents"]) == ("toy", f"sft:{refs['sft'].sha256}")
    assert tags["data"] == f"rows:{refs['rows'].sha256}"
    assert "torch==" in tags["versions"]
    assert "python==3" in tags["versions"]
    assert tags["environment"] == pins_digest()
    machine = describe_machine(to_dict(find_machine(HardwareConfig())))
    assert (tags["machine"], sft.facts[0], root.facts[:2]) == (machine, machine, ("4 iterations", machine))
    assert machine not in data.facts
    text = tree_text(tags, root)
    assert f"  machine: {machine}\n" in text
    assert text.startswith("toy-2 version 1\n")
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["grpo", "sft", "rows", "rows"]


def test_reading_a_lineage_does_not_wait_for_torch() -> None:
    script = "import sys, rlcore.tasks.tracking.lineage; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_a_result_without_a_record_stands_by_its_digest(tracked_home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    (record,) = (tracked_home.cache / "sft").glob("*.json")
    record.unlink()
    _, root = find_lineage(tracked_home, "toy-2/1")
    assert root.parents[0].facts == ("no record in this state directory",)
    assert root.parents[0].sha256 == refs["sft"].sha256


def test_a_model_that_is_not_there_or_not_ours_is_an_error(tracked_home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    for name in ("toy-2@champion", "toy-2/7", "nothing/1", "toy-2"):
        with pytest.raises(ModelError, match="no registered model"):
            find_lineage(tracked_home, name)
    (record,) = (tracked_home.cache / "grpo").glob("*.json")
    record.unlink()
    with pytest.raises(ModelError, match="no stage of this state directory"):
        find_lineage(tracked_home, "toy-2/1")
