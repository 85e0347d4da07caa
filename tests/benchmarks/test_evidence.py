"""The evidence: measures and claims, presets of equal sizes, and arms that are not run twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import __main__ as program
from benchmarks.evidence.__main__ import (
    CLAIMS,
    TASKS,
    Contrast,
    claims_table,
    difference,
    read_plan,
    read_results,
    value_of,
    verdict,
)
from benchmarks.evidence.__main__ import write_results as write
from benchmarks.evidence.runs import added, curve_of, figures, other_figures
from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ConfigError, TrainingError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.models.importing import import_model
from rlcore.tasks.presets.graph import rl_stages, sampling_of
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

CLAIMS_PLAN = """
tasks = ["sums"]
[[claim]]
text = "The fast method learns faster"
source = "a textbook"
  [[claim.contrast]]
  name = "fast against slow"
  arms = { fast = 1, slow = -1 }
  measure = "learning"
  expected = 0.05
  [[claim.contrast]]
  name = "end"
  arms = { fast = 1, slow = -1 }
  measure = "accuracy"
  margin = 0.05
  primary = false
  tasks = ["words"]
"""


def run(scores: Sequence[float], *, right: str = "", seconds: float = 10.0, before: float = 0.0) -> dict[str, Any]:
    """Run an arm with iterations of 100 completions and so many seconds, after other stages of so many seconds."""
    places = range(1, len(scores) + 1)
    costs = {"completions": [100 * each for each in places], "cpu_seconds": [seconds * each for each in places]}
    total = before + seconds * len(scores)
    fixed = {"memory": {"total": 20.0 * 2**30}, "figures": {"win_rate": 0.5}}
    return {"right": right, "cpu_seconds": total, "curve": costs | {"score": list(scores)}, **fixed}


def test_measures_of_a_run() -> None:
    arm = run([0.2, 0.4, 0.9], right="1100")
    names = ("accuracy", "learning", "memory", "figures.win_rate")
    assert [value_of(arm, name) for name in names] == [0.5, pytest.approx(0.5), 20.0, 0.5]
    # Of iterations of unequal size the larger counts more: (100 · .2 + 300 · .4) / 400.
    unequal = arm["curve"] | {"completions": [100, 400, 401], "score": [0.2, 0.4, 0.35]}
    assert value_of(arm | {"curve": unequal}, "learning") == pytest.approx(0.35)
    none = {"right": "", "memory": {}, "curve": {"completions": []}, "figures": {}}
    assert [value_of(none, name) for name in (*names, "score_at_equal_cpu")] == [None] * 5


@pytest.mark.parametrize(
    ("seconds", "score"),
    [
        (30.0, 0.9),  # 300 completions, the last quarter from 225 on: all of the third iteration
        (25.0, (12.5 * 0.4 + 50 * 0.9) / 62.5),  # 250, the last quarter from 187.5 on
        (0.0, 0.2),  # nothing yet: the first iteration
        (99.0, 0.9),
    ],
)
def test_the_score_at_equal_cpu_is_the_mean_of_the_last_quarter(seconds: float, score: float) -> None:
    arm = run([0.2, 0.4, 0.9])
    assert value_of(arm, "score_at_equal_cpu", cpu_seconds=seconds) == pytest.approx(score)
    after = arm | {"cpu_seconds": arm["cpu_seconds"] + 5.0}  # 5 s of earlier stages come first
    assert value_of(after, "score_at_equal_cpu", cpu_seconds=seconds + 5.0) == pytest.approx(score)


def test_equal_cpu_is_that_of_the_cheaper_arm_and_seeds_are_those_of_all_arms() -> None:
    tried = {"fast": {0: run([0.2, 0.4, 0.9], seconds=20.0), 1: run([1.0])}, "slow": {0: run([0.2, 0.2, 0.2])}}
    contrast = Contrast(name="", arms={"fast": 1.0, "slow": -1.0}, measure="score_at_equal_cpu", expected=0.1)
    # fast has 150 completions after slow's 30 s, the last quarter from 112.5 on: .4
    assert difference(contrast, tried)[0] == [pytest.approx(0.2)]


def test_more_seeds_do_not_narrow_what_all_of_them_measure_on_the_same_pairs() -> None:
    contrast = Contrast(name="", arms={"model": 1.0}, measure="figures.gain", expected=0.1)

    def error(gains: Sequence[float], ends: float) -> float:
        figures = [{"gain": gain, "gain_low": gain - ends, "gain_high": gain + ends} for gain in gains]
        runs = {seed: run([0.1]) | {"figures": each} for seed, each in enumerate(figures)}
        return difference(contrast, {"model": runs})[1]

    assert error([0.3] * 3, 1.96 * 0.02) == pytest.approx(0.02) == error([0.3] * 9, 1.96 * 0.02)
    assert error([0.29, 0.30, 0.31], 1.96 * 0.01) == pytest.approx((1e-4 / 3 + 1e-4) ** 0.5)


@pytest.mark.parametrize(
    ("low", "high", "of_difference", "of_none"),
    [
        (0.01, 0.04, "held", "held"),
        (-0.01, 0.04, "not told apart", "held"),
        (-0.04, -0.01, "contradicted", "held"),
        (0.06, 0.09, "held", "contradicted"),
        (0.01, 0.09, "held", "not told apart"),
    ],
)
def test_a_verdict_is_that_of_the_interval(low: float, high: float, of_difference: str, of_none: str) -> None:
    arms = {"fast": 1.0, "slow": -1.0}
    assert verdict(Contrast(name="", arms=arms, measure="learning", expected=0.1), low, high) == of_difference
    assert verdict(Contrast(name="", arms=arms, measure="learning", margin=0.05), low, high) == of_none


def test_the_table_has_both_intervals_and_a_verdict_on_each_task(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(CLAIMS_PLAN)
    for seed, last in enumerate((0.70, 0.71, 0.72)):
        arms = {"fast": run([0.2, 0.6, last], right="1101"), "slow": run([0.2, 0.3, 0.5], right="1100")}
        for task in ("sums", "words", "other"):
            write({"task": task, "seed": seed, "arms": arms}, tmp_path / f"evidence-{task}-{seed}.json")
    rows = claims_table(read_plan(tmp_path / "claims.toml"), read_results(tmp_path)).splitlines()
    assert rows[0] == "| claim | contrast | other | sums | words |"
    # Means (.5, .5033, .5067) − .3333; the standard error is .01 / 3 / √3, Student's t of 2 degrees 4.303.
    cell = "+0.170 [+0.162, +0.178], **held** [+0.162, +0.178]"
    assert rows[2] == f"| The fast method learns faster | fast against slow | {cell} | {cell} | – |"
    assert rows[3] == "|  | end | +0.250 [+0.250, +0.250], secondary | – | +0.250 [+0.250, +0.250], secondary |"


def test_a_primary_contrast_counts_once_per_task(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(
        CLAIMS_PLAN.replace("primary = false", "").replace('["sums"]', '["sums", "more"]')
    )
    assert read_plan(tmp_path / "claims.toml").level == 0.05 / 3


DATA = ("prompts", "pairs", "judge_pairs")
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=256)


@pytest.mark.parametrize("name", ["smollm2", "tiny", "qwen"])
def test_all_arms_of_rl_have_equal_sizes_and_rates(name: str) -> None:
    config = open_preset(TASKS[name].preset)
    arms = rl_stages(config)
    assert len(arms) == 15
    sizes = {
        (
            each.num_iterations,
            each.prompts_per_iteration,
            each.group_size,
            each.update.tokens_per_microbatch,
            round(each.learning_rate / (10 if each.update.lora.rank else 1), 12),
        )
        for each in arms.values()
    }
    assert len(sizes) == 1
    assert len({each.critic.learning_rate for arm, each in arms.items() if arm.startswith("ppo")}) == 1
    lengths = {found.max_new_tokens for each in config.stages.values() if (found := sampling_of(each))}
    assert lengths == {config.evaluation.max_new_tokens}


def test_no_stage_on_a_gpu_keeps_the_settings_of_the_small_model() -> None:
    large, small = open_preset(TASKS["qwen"].preset), open_preset(TASKS["smollm2"].preset)
    assert large.stages.keys() == small.stages.keys()
    assert not [name for name, stage in large.stages.items() if stage == small.stages[name]]
    assert not [name for name, data in large.data.items() if data.max_tokens == small.data[name].max_tokens]


def test_the_chat_preset_asks_for_the_file_of_each_dataset() -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(TASKS["chat"].preset)
    missing = [line.strip().partition(":")[0] for line in caught.value.what.splitlines()[1:]]
    assert missing == [f"data.{name}.path" for name in DATA]


def small_chat(project: Path) -> list[str]:
    rows = [
        {"id": f"{n}", "prompt": f"Name {n} things.", "chosen": "a " * (n % 7), "rejected": "b", "annotator": "me"}
        for n in range(1, 200)
    ]
    pairs = project / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows if row["chosen"]), encoding="utf-8")
    import_model(ModelConfig(source="scratch", shape=SHAPE), project / "model", seed=0)
    return [
        *(f"data.{name}.path={pairs}" for name in DATA),
        *(f"data.{name}.{key}" for name in DATA for key in ("num_train=30", "num_eval=20")),
        "model.source=folder",
        f"model.path={project / 'model'}",
        "model.file=",
        "model.license=MIT",
        *(f"stages.{name}.backbone.layers=1" for name in ("reward_model", "judge_model")),
        *(f"stages.{name}.num_iterations=1" for name in ("grpo_chat", "ppo_chat")),
        *(f"stages.{name}.sampling.max_new_tokens=8" for name in ("grpo_chat", "ppo_chat", "win_grpo", "win_ppo")),
        "evaluation.num_problems=8",
        "evaluation.max_new_tokens=8",
    ]


def test_the_judge_of_the_chat_preset_is_trained_on_other_pairs_than_the_reward(tmp_path: Path) -> None:
    config = open_preset(TASKS["chat"].preset, small_chat(tmp_path))
    rewards = {term.stage for each in rl_stages(config).values() for term in each.rewards}
    judges = {config.stages[name].settings.judge.stage for name in ("win_grpo", "win_ppo")}
    assert (rewards, judges) == ({"reward_model"}, {"judge_model"})
    parts = [config.data[data].adapter.partition(":")[2] for data in DATA]
    assert parts == ["POLICY", "POLICY", "JUDGE"]
    assert [config.stages[name].data for name in ("reward_model", "judge_model")] == [("pairs",), ("judge_pairs",)]


@pytest.mark.slow
def test_the_chat_preset_runs_and_the_benchmark_finds_the_figures_of_its_models(tmp_path: Path) -> None:
    overrides = [part for each in small_chat(tmp_path) for part in ("--set", each)]
    done = run_warm(["run", TASKS["chat"].preset, *overrides], environment(tmp_path), ROOT)
    assert done.returncode == 0, done.stderr
    wanted = {
        "reward_model": {"rm/eval_accuracy", "rm/gain_over_length"},
        "win_grpo": {"win_rate/rate", "win_rate/length_controlled", "judge/agreement", "judge/beyond_length"},
        "win_ppo": {"win_rate/rate_low", "win_rate/rate_high", "judge/pairs"},
    }
    for stage, names in wanted.items():
        assert names <= other_figures(folder(tmp_path, stage)).keys()


ROW = {"rollouts/count": 8.0, "rollouts/tokens": 100.0, "seconds/processor": 2.0, "reward/mean": 0.5}


def test_a_curve_adds_up_costs_and_has_the_verifiers_score_where_another_reward_is_trained_on() -> None:
    by_model = ROW | {"reward/mean": 3.0, "reward/term/procedural": 0.25}
    curve = curve_of([ROW, by_model])
    assert (curve["completions"], curve["tokens"], curve["cpu_seconds"]) == ([8, 16], [100, 200], [2, 4])
    assert curve["score"] == [0.5, 0.25]
    wall = {f"seconds/{name}": 1.0 for name in ("rollout", "score", "update", "sync")}
    assert curve_of([ROW | wall] * 2, on_gpu=True)["cpu_seconds"] == [4.0, 8.0]


def test_costs_are_those_of_the_run_or_of_all_attempts_and_of_what_arms_share(tmp_path: Path) -> None:
    usage, shared = tmp_path / "usage.jsonl", tmp_path / "shared.jsonl"
    attempt = json.dumps({"cpu_seconds": 5.0, "completions": 3, "tokens": 7}) + "\n"
    usage.write_text(attempt * 2, encoding="utf-8")
    shared.write_text(attempt, encoding="utf-8")
    offline = figures(tmp_path, None, usage, [])
    assert (offline["cpu_seconds"], offline["completions"], offline["tokens"]) == (10, 6, 14)
    assert set(map(len, offline["curve"].values())) == {0}
    (tmp_path / "history.json").write_text(json.dumps([{"step": 1}, ROW]), encoding="utf-8")
    online = figures(tmp_path, None, usage, [shared])
    assert (online["cpu_seconds"], online["completions"], online["tokens"]) == (7, 11, 107)


def test_an_arm_pays_for_the_samples_that_it_trains_on_and_not_for_data_of_others() -> None:
    config = open_preset(program.TASKS["smollm2"].preset)
    inputs = {stage.name: stage.inputs for stage in stages(config)}
    found = {name: added(config, inputs[name], name) for name in ("sft", "grpo", "kept", "dpo", "reward_model")}
    assert found == {
        "sft": ("sft",),
        "grpo": ("grpo",),
        "kept": ("rejection", "kept"),
        "dpo": ("prepare_few_preferences", "dpo"),
        "reward_model": ("prepare_preferences", "reward_model"),
    }


@pytest.mark.slow  # a whole arm of a benchmark
def test_an_arm_of_a_preset_gives_its_figures(tmp_path: Path) -> None:
    keys = [f"{key} = {value}" for key, value in (each.split("=", 1) for each in MICRO) if "stages.ppo" not in key]
    preset = tmp_path / "arms.toml"
    head = 'extends = "tiny"\nname = "arms"\nwithout = ["stages.ppo"]\n'
    preset.write_text(head + "\n".join(keys) + "\n", encoding="utf-8")
    env = environment(tmp_path / "home")
    call = "benchmarks.evidence.runs:main"
    done = run_warm([str(preset), "0", "grpo"], env, ROOT, call=call)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found, (unused,) = made["figures"], made["unused"]
    assert len(found["right"]) == 40
    assert (Path(unused) / "model").is_dir()
    assert found["curve"]["completions"] == [16, 32, 48, 64]
    assert found["completions"] == 64
    assert found["tokens"] == found["curve"]["tokens"][-1] > 64
    assert found["memory"]["total"] > 0 < found["cpu_seconds"]
    again = run_warm([str(preset), "0", "base"], env, ROOT, call=call)
    start = json.loads(again.stdout.splitlines()[-1])
    assert (start["figures"]["cpu_seconds"], start["unused"]) == (0, []), again.stderr


@pytest.mark.parametrize("task", ["smollm2", "tiny", "long", "qwen"])
def test_every_arm_of_the_plan_is_a_stage_of_its_task_and_none_is_run_twice(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    path = tmp_path / f"evidence-{task}-7.json"

    def fake(arguments: list[str], home: Path) -> dict[str, Any]:
        arm = arguments[2]
        if arm == "ppo" and ran.count("ppo") == 0:
            ran.append(arm)
            raise SystemExit("killed")
        ran.append(arm)
        folder = home / arm
        folder.mkdir(parents=True)
        assert arm not in json.loads(path.read_text())["arms"] if path.exists() else True
        return {"figures": {"right": "01"}, "unused": [str(folder)]}

    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_arm", fake)
    with pytest.raises(SystemExit, match="killed"):
        program.run_seed(task, 7, tmp_path / "home")
    program.run_seed(task, 7, tmp_path / "home")
    assert not (tmp_path / "home").exists()
    program.run_seed(task, 7, tmp_path / "home")
    assert [arm for arm in ran if ran.count(arm) > 1] == ["ppo", "ppo"]
    results, plan = read_results(tmp_path)[task], read_plan(CLAIMS)
    planned = (*plan.tasks, "qwen")
    contrasts = [each for claim in plan.claim for each in claim.contrast if task in (each.tasks or planned)]
    assert contrasts
    assert set(results) == set(ran) >= {arm for each in contrasts for arm in each.arms}


def test_a_figure_that_is_no_number_does_not_lose_the_arm(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"rm/eval_accuracy": 0.5, "rm/gain_over_length": NaN}', encoding="utf-8")
    assert other_figures(tmp_path) == {"rm/eval_accuracy": 0.5}


def test_an_artifact_stays_until_the_figures_of_its_arm_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    unwritable = {"figures": {"right": float("nan")}, "unused": [str(artifact)]}
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_arm", lambda *_: unwritable)
    with pytest.raises(ValueError, match="not JSON compliant"):
        program.run_seed("tiny", 0, tmp_path / "home")
    assert artifact.is_dir()


@pytest.mark.slow
def test_a_failed_arm_is_named_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"grpo failed with code 1: .*no_such_preset") as raised:
        program.run_arm(["no_such_preset", "0", "grpo"], tmp_path)
    assert Path(raised.value.where).is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--task", "tiny", "--arms", "gpro"], "--arms: tiny has no gpro; there are base, dpo, grpo"),
        (["--task", "tiny", "--seeds", "99", "--home", "/proc/none"], "/proc/none"),
    ],
)
def test_a_wrong_option_is_refused_in_words(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["evidence", *given])
    assert program.main() == 1
    assert message in capsys.readouterr().err
