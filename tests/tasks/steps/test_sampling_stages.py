"""Every stage that samples asks the engine of its run, and plays the episodes of its recipe; a script answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.config import EngineConfig, ModelConfig, ShapeConfig
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.models.importing import import_model
from rlcore.models.integrity import write_model_digest
from rlcore.sampling.base import Sampler
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.tasks.kinds.data import sampled_step
from rlcore.tasks.kinds.evaluate import step as evaluate
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps import sampled_answers
from rlcore.tasks.steps.base import MODEL, StageContext
from rlcore.tasks.steps.rows import read_demonstrations
from rlcore.tasks.store.storage import read_json, read_table, write_table
from rlcore.text.tokenization import ChatTokenizer

SHAPE = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8)
VLLM = ("engine.kind=vllm", "engine.max_model_len=100")
KEPT = (
    "stages.kept={kind='rejection',policy='sft',data=['prompts'],num_samples=2,num_eval=1,rewards=[{kind='math'}],"
    "sampling={max_new_tokens=96,episodes={tools=['calculator'],max_turns=2,max_turn_tokens=36,max_tool_output_tokens=16}}}"
)
CALL, ANSWER = "<tool:calculator>{0}*3</tool>", "#### {0}"
NUM_PROMPTS = 12

Texts = Mapping[str, Sequence[str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "sft"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / MODEL, seed=0)
    write_model_digest(folder, stage="sft", model=folder / MODEL)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """The artifact of a data set of questions ``n*3``, some of them held out."""
    rows = [
        {
            "prompt_id": f"p{number}",
            "messages": [{"role": "user", "content": f"{number}*3"}],
            "reference": str(3 * number),
            "task": "products",
            "split": "train",
        }
        for number in range(2 * NUM_PROMPTS)
    ]
    write_table(pd.DataFrame(rows[:NUM_PROMPTS]), tmp_path / "prompts" / "train.parquet")
    write_table(pd.DataFrame(rows[NUM_PROMPTS:]), tmp_path / "prompts" / "eval.parquet")
    return tmp_path / "prompts"


def run_stage(
    name: str, config: RunConfig, texts: Texts, inputs: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[EngineConfig]]:
    """The artifact of the stage, and the engines that it asked for; ``texts`` are what each of them answers."""
    asked: list[EngineConfig] = []

    @contextmanager
    def scripted(model: Path, tokenizer: ChatTokenizer, *, config: EngineConfig, **_: Any) -> Iterator[Sampler]:
        asked.append(config)
        yield ScriptedSampler.from_texts(texts, tokenizer)

    for module in (evaluate, sampled_answers, sampled_step):
        monkeypatch.setattr(module, "open_engine", scripted)
    stage = next(each for each in stages(config) if each.name == name)
    folder, work = inputs["prepare_prompts"].parent / "artifact", inputs["prepare_prompts"].parent / "work"
    folder.mkdir()
    work.mkdir()
    context: Any = StageContext(
        stage=name,
        folder=folder,
        work=work,
        inputs=inputs,
        input_refs={},
        config=stage.sections(config),
        seed=0,
        stage_key="key",
        checkpoint_key="key",
        tracker=silent(),
        log=print,
        report_progress=lambda *_, **__: None,
        run_task=lambda name, number, work: work(),
    )
    stage.run(context)
    return folder, asked


def silent() -> Any:
    """A tracker that keeps nothing."""
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731 - one for every call
    names = ("log_metrics", "log_artifact", "log_dataset", "log_params", "set_tags")
    return SimpleNamespace(**dict.fromkeys(names, nothing))


def episodes(numbers: range, *, samples: int) -> dict[str, list[str]]:
    """To each prompt a call of the calculator, and the answer that the tool gave; both as scripts want them."""
    texts = {f"p{n}": [CALL.format(n)] * samples for n in numbers}
    return texts | {f"p{n}/{j}/1": [ANSWER.format(3 * n)] for n in numbers for j in range(samples)}


def test_an_evaluation_plays_the_episodes(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_preset("agentic", [*VLLM, "evaluation.num_samples=0"])
    texts = episodes(range(NUM_PROMPTS, 2 * NUM_PROMPTS), samples=1)
    inputs = {"sft": checkpoint, "prepare_prompts": prompts}
    folder, asked = run_stage("evaluate_sft", config, texts, inputs, monkeypatch)
    assert asked == [config.engine]
    summary = read_json(folder / "summary.json")
    assert (summary["eval/accuracy"], summary["eval/problems"]) == (1.0, NUM_PROMPTS)
    words = read_table(folder / "answers.parquet")["completion"][0]
    assert words == f"<tool:calculator>{NUM_PROMPTS}*3</tool>\n[calculator] {3 * NUM_PROMPTS}\n#### {3 * NUM_PROMPTS}"


def test_an_evaluation_may_have_its_own_engine(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "evaluation.engine={kind='native'}"
    config = open_preset("agentic", [*VLLM, own, "evaluation.num_samples=0"])
    inputs = {"sft": checkpoint, "prepare_prompts": prompts}
    _, asked = run_stage("evaluate_sft", config, {}, inputs, monkeypatch)
    assert [engine.kind for engine in asked] == ["native"]


def test_rejection_keeps_the_calls(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_preset("agentic", [*VLLM, KEPT])
    texts = episodes(range(NUM_PROMPTS), samples=2)
    inputs = {"sft": checkpoint, "prepare_prompts": prompts}
    folder, asked = run_stage("kept", config, texts, inputs, monkeypatch)
    assert asked == [config.engine]
    rows = [*read_demonstrations(folder / "train.parquet"), *read_demonstrations(folder / "eval.parquet")]
    assert len(rows) == NUM_PROMPTS  # the second of two equal answers is a duplicate
    number = int(rows[0].messages[0].content.removesuffix("*3"))
    turns = [(message.role, message.content) for message in rows[0].messages[1:]]
    assert turns == [("assistant", CALL.format(number)), ("tool", str(3 * number))]
    assert rows[0].completion == ANSWER.format(3 * number)


def test_sampled_pairs_ask_the_runs_engine(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = ("data.preferences.adapter=policy", "data.preferences.policy=sft", "data.preferences.options={}")
    sizes = ("data.preferences.num_train=8", "data.preferences.num_eval=1", "data.preferences.max_tokens=96")
    config = open_preset("tiny", [*VLLM, *sampled, *sizes])
    texts = {f"p{n}": [ANSWER.format(3 * n), ANSWER.format(3 * n + 1)] for n in range(NUM_PROMPTS)}
    inputs = {"sft": checkpoint, "prepare_prompts": prompts}
    folder, asked = run_stage("prepare_preferences", config, texts, inputs, monkeypatch)
    assert asked == [config.engine]
    assert len(read_table(folder / "train.parquet")) == 8


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rl_asks_the_engine_that_its_evaluation_asks(name: str) -> None:
    config = open_preset("tiny", VLLM)
    by_name = {stage.name: stage for stage in stages(config)}
    own = by_name[name].sections(config).stage.settings.sampling.engine
    assert own == by_name[f"evaluate_{name}"].sections(config).engine == config.engine
