"""The library's front door: its public names, and the example of its docstring as it stands there."""

from __future__ import annotations

import ast
import inspect
import runpy
import textwrap
from pathlib import Path

import pytest
import torch

import rlcore
from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.architecture.source_files import ROOT

PUBLIC = """
ChatTokenizer CheckpointConfig Components CriticConfig CurveRecorder FailedRollout HealthConfig HealthStop HeldOut
KlConfig Learner LimitConfig LogRecorder Message ModelConfig NativeSampler ObjectiveConfig OptimConfig Prompt Recorder
RewardResources RewardTerm RlConfig RlcoreError Rollout Run Sampler SamplingConfig SamplingParams Score ScoredRollout
ScriptedSampler ShapeConfig TensorBoard Trackio TrainResult UpdateConfig Wandb build_rewards chat_prompts finish
function_reward import_model iterate load_policy native_components open_run save_model train
"""
SHAPE = ShapeConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, max_positions=128)


def example() -> str:
    """The indented lines of the docstring of ``rlcore``."""
    lines = (rlcore.__doc__ or "").splitlines()
    indented = [place for place, line in enumerate(lines) if line.startswith("    ")]
    return textwrap.dedent("\n".join(lines[indented[0] : indented[-1] + 1]))


def test_the_public_names_are_these() -> None:
    assert rlcore.__all__ == sorted(PUBLIC.split())


def test_a_type_checker_sees_the_names_that_python_finds() -> None:
    tree = ast.parse(inspect.getsource(rlcore))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == rlcore._HOMES


def test_every_public_name_is_there_and_no_other() -> None:
    for name in rlcore.__all__:
        assert getattr(rlcore, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'grpo'"):
        rlcore.grpo  # type: ignore[attr-defined]  # noqa: B018
    assert set(rlcore.__all__) <= set(dir(rlcore))


def test_the_example_of_the_docstring_runs_as_it_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(ModelConfig(source="scratch", shape=SHAPE), Path("model"), seed=0)
    Path("example.py").write_text(example(), encoding="utf-8")
    result = runpy.run_path("example.py")["result"]
    assert [row["iteration"] for row in result.history] == list(range(1, 11))
    trained = rlcore.load_policy(Path("trained"), device=torch.device("cpu"), dtype=torch.float32)
    assert trained.config.vocab_size == 262


def test_the_example_has_at_most_thirty_lines_and_is_the_one_of_the_documentation() -> None:
    assert len(example().splitlines()) <= 30
    assert f"```python\n{example()}\n```" in (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
