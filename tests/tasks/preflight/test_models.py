"""Models in a preset: LoRA that an engine would round away, unusual values, and registration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.keys.plan import deleted_lines
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.preflight.model_checks import adapter_errors
from rlcore.tasks.preflight.preset_checks import unread_data, unusual_values
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import download_model, find_by_sha256, find_number, read_tags
from rlcore.tasks.tracking.runs import open_tracker
from tests.flows.micro import PRESETS
from tests.toys import ToyConfig, no_sections

ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


def rows(context: StageContext) -> StageResult:
    (context.folder / "rows").write_text("few")
    return StageResult(metrics={})


def train(context: StageContext) -> StageResult:
    ran.append("train")
    (context.folder / "model").mkdir()
    (context.folder / "model" / "config.json").write_text("{}")
    (context.folder / "history.json").write_text("[]")
    return StageResult(metrics={"eval/accuracy": 0.5})


ROWS = Stage(name="rows", artifact="dataset", run=rows, sections=no_sections)
SFT = Stage(name="sft", artifact="checkpoint", run=train, sections=no_sections, inputs=("rows",), registered_as="sft")
GRPO = Stage(
    name="grpo", artifact="policy", run=train, sections=no_sections, inputs=("sft", "rows"), registered_as="grpo"
)


def run(home: Home, name: str = "toy") -> Mapping[str, ArtifactRef]:
    config = ToyConfig.run(name=name)
    return run_pipeline([ROWS, SFT, GRPO], config, ["grpo"], home=home, experiment=name)


def test_a_model_is_registered_with_its_digests_and_metrics(tracked_home: Home) -> None:
    refs, tracker = run(tracked_home), open_tracker(tracked_home)
    version = find_number(tracker, "toy-grpo", "1")
    assert version is not None
    assert version == find_by_sha256(tracker, "toy-grpo", refs["grpo"].sha256)
    tags = read_tags(tracker, version)
    assert (tags["preset"], tags["stage_key"]) == ("toy", refs["grpo"].stage_key)
    assert tags["data"] == f"rows:{refs['rows'].sha256}"
    assert tags["parents"] == f"sft:{refs['sft'].sha256}"
    model = tracker.client.get_logged_model(version.model_id)
    assert [(metric.key, metric.value) for metric in model.metrics] == [("eval/accuracy", 0.5)]
    assert model.source_run_id == refs["grpo"].mlflow_run_id


def test_a_cached_model_is_registered_once_under_each_name_that_asks_for_it(tracked_home: Home) -> None:
    first = run(tracked_home)
    assert run(tracked_home) == first
    assert run(tracked_home, "mine") == first
    assert ran == ["train", "train"]  # SFT and GRPO, once each
    tracker = open_tracker(tracked_home)
    found = {name: tracker.client.search_model_versions(f"name = '{name}'") for name in ("toy-grpo", "mine-grpo")}
    assert {name: len(versions) for name, versions in found.items()} == {"toy-grpo": 1, "mine-grpo": 1}
    (mine,) = found["mine-grpo"]
    assert (mine.tags["preset"], mine.tags["sha256"]) == ("mine", first["grpo"].sha256)


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_where_a_person_has_deleted_the_run_in_mlflow_the_present_run_publishes_the_cached_model(
    what: str, tracked_home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refs, tracker = run(tracked_home), open_tracker(tracked_home)
    ref = refs["grpo"]
    if what == "run":
        tracker.client.delete_run(ref.mlflow_run_id)
    else:
        tracker.client.delete_experiment(tracker.find_run(ref.mlflow_run_id).experiment_id)  # type: ignore[union-attr]
    (line,) = deleted_lines({"grpo": ref}, tracked_home)
    assert line == "mlflow: the run of grpo was deleted; the next run publishes its results"
    tracker.client.delete_registered_model("toy-grpo")
    ran.clear()
    with caplog.at_level("WARNING", logger="rlcore"):
        assert run(tracked_home) == refs
    assert ran == []
    words = [record.getMessage() for record in caplog.records]
    assert ["the MLflow experiment 'toy' was deleted; this run is in 'toy 2'"] * (what == "experiment") == words[:-1]
    assert words[-1].startswith("grpo: its MLflow run is not there or was deleted; this run publishes its model")
    assert download_model("models:/toy-grpo/1", tmp_path / "files").is_dir()
    assert run(tracked_home) == refs  # and again, without a word about the model


SERVER = "kind='vllm'"
ATTACHED = "kind='vllm',urls=['http://a:1']"
RANKS = "distributed={backend='processes',learner_ranks=2}"
HALVES = [("bfloat16", "auto"), ("float32", "float16")]


def errors(engine: str, hardware: str, dtype: str, rank: int, *more: str) -> list[str]:
    overrides = (
        f"engine={{{engine},dtype='{dtype}'}}",
        f"hardware.dtype={hardware}",
        f"stages.grpo.update.lora.rank={rank}",
        *more,
    )
    config = open_preset("tiny", overrides)
    return list(adapter_errors(config, tuple(config.stages)))


@pytest.mark.parametrize(("hardware", "dtype"), HALVES)
@pytest.mark.parametrize(
    ("engine", "rank", "more", "fix"),
    [
        (ATTACHED, 32, (), "set engine.urls = [];"),
        (SERVER, 513, (), "set update.lora.rank to at most 512;"),
        (SERVER, 32, (RANKS,), "set distributed.backend = 'local';"),
        (ATTACHED, 513, (RANKS,), "set engine.urls = [] and update.lora.rank to at most 512 and distributed.backend"),
    ],
)
def test_merged_weights_in_half_precision_are_refused_with_settings_that_send_the_adapter(
    engine: str, rank: int, more: tuple[str, ...], fix: str, hardware: str, dtype: str
) -> None:
    (error,) = errors(engine, hardware, dtype, rank, *more)
    half = hardware if dtype == "auto" else dtype
    assert error.startswith(f"stages.grpo.update.lora.rank = {rank}: the engine would get merged weights in {half}")
    assert fix in error
    assert errors(engine, "float32", "auto", rank, *more) == []  # the other fix
    assert errors(engine, hardware, dtype, 0, *more) == []


@pytest.mark.parametrize(("hardware", "dtype"), HALVES)
@pytest.mark.parametrize(("engine", "rank"), [(SERVER, 1), (SERVER, 512), ("kind='native'", 513)])
def test_an_adapter_that_can_be_sent_is_accepted(engine: str, rank: int, hardware: str, dtype: str) -> None:
    assert errors(engine, hardware, dtype, rank) == []


def test_a_preset_for_a_gpu_that_is_not_here_is_refused_as_it_would_be_there() -> None:
    (error,) = errors(ATTACHED, "auto", "auto", 8, "hardware.device=cuda")
    assert "merged weights in half precision" in error


FOLDER = ("model.source=folder", "model.path=model")
WEIGHTS, LORA = "recipes that train all weights of a pretrained model", "recipes that train LoRA of a pretrained model"


def rates(preset: str, *overrides: str) -> list[str]:
    """The warnings about learning rates."""
    config = open_preset(preset, overrides)
    return [each for each in unusual_values(config, config.stages) if "learning_rate" in each]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_values_and_data_of_committed_presets_are_usual(preset: str) -> None:
    config = open_preset(preset)
    assert [*unusual_values(config, config.stages), *unread_data(config)] == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.sft.optim.warmup_steps=481", "stages.sft.optim.warmup_steps = 481: the stage has at most 480 steps"),
        (
            "stages.reward_model.optim.warmup_steps=301",
            "stages.reward_model.optim.warmup_steps = 301: the stage has at most 300 steps",
        ),
        (
            "stages.ppo.update.optim.warmup_steps=41",
            "stages.ppo.update.optim.warmup_steps = 41: the stage has at most 40 steps",
        ),
        (
            "stages.ppo.critic.warmup_iterations=20",
            "stages.ppo.critic.warmup_iterations = 20: none of the 20 iterations trains the policy",
        ),
    ],
)
def test_a_warmup_beyond_its_stage_is_named_with_both_numbers(override: str, expected: str) -> None:
    key, _, value = override.partition("=")
    config = open_preset("tiny", (f"{key}={int(value) - 1}",))
    assert unusual_values(config, config.stages) == []
    config = open_preset("tiny", (override,))
    assert unusual_values(config, config.stages) == [f"warning: {expected}; is this intended?"]


def test_a_dataset_that_no_stage_reads_is_named() -> None:
    config = open_preset("tiny", ("without=['stages.reward_model', 'stages.ppo']",))
    assert unread_data(config) == [
        "warning: data.preferences: no stage reads it; leave it out: without = ['data.preferences']"
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("stages.grpo.learning_rate=1e-4",), []),
        (("stages.grpo.learning_rate=2e-4",), [("stages.grpo.learning_rate = 0.0002", WEIGHTS)]),
        (("stages.sft.learning_rate=2e-3",), [("stages.sft.learning_rate = 0.002", WEIGHTS)]),
        (("stages.grpo.learning_rate=1e-3", "stages.grpo.update.lora.rank=8"), []),
        (
            ("stages.grpo.learning_rate=2e-3", "stages.grpo.update.lora.rank=8"),
            [("stages.grpo.learning_rate = 0.002", LORA)],
        ),
        (("stages.grpo.learning_rate=1.0",), [("stages.grpo.learning_rate = 1.0", "recipes have at most 0.1")]),
        (("stages.grpo.learning_rate=3e-4", "model.source=scratch", "model.path="), []),
    ],
)
def test_a_rate_beyond_all_recipes_is_a_warning(overrides: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    usual = ("stages.sft.learning_rate=1e-5", "stages.reward_model.learning_rate=1e-5", "stages.ppo.learning_rate=1e-6")
    found = rates("tiny", *FOLDER, "stages.grpo.learning_rate=1e-6", *usual, *overrides)
    assert len(found) == len(expected)
    for line, (value, recipes) in zip(found, expected, strict=True):
        assert line.startswith(f"warning: {value}: {recipes}")
