"""The public names, their errors and extras, and what importing them brings in."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore import errors, extras
from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import RlcoreError
from rlcore.extras import describe_installation, engine_command, install_command, make_command, requirements
from rlcore.models.importing import import_model
from tests.architecture.source_files import ROOT, imported_at_module_level, modules

PUBLIC = """
ChatTokenizer CheckpointConfig Components CriticConfig CurveRecorder FailedRollout HealthConfig HealthStop HeldOut
KlConfig Learner LimitConfig LogRecorder Message ModelConfig NativeSampler ObjectiveConfig OptimConfig Prompt Recorder
RewardResources RewardTerm RlConfig RlcoreError Rollout Run Sampler SamplingConfig SamplingParams Score ScoredRollout
ScriptedSampler ShapeConfig TensorBoard Trackio TrainResult UpdateConfig Wandb build_rewards chat_prompts finish
function_reward import_model iterate load_policy native_components open_run save_model train
"""

SHAPE = ShapeConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, max_positions=128)


def example() -> str:
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


MEASURE = """
import importlib, json, sys, time
started = time.process_time()
import rlcore
seconds = time.process_time() - started
def seen():
    return sorted({".".join(name.split(".")[: 2 if name.startswith("rlcore.") else 1]) for name in sys.modules})
light = seen()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"seconds": seconds, "light": light, "all": seen()}))
"""

NEVER = {
    "prefect", "mlflow", "pandera", "datasets", "jaxtyping", "rlcore.tasks", "rlcore.flows", "rlcore.data_contracts",
}  # fmt: skip

LAZY = {"vllm", "ray", "peft", "bitsandbytes", "reasoning_gym", "lm_eval", "mcp"}


def library() -> list[str]:
    """The modules of the library, without those that wrap an optional package: only grader processes import them."""
    paths = [path for path, tree in modules().items() if not LAZY & imported_at_module_level(tree)]
    return [path.removesuffix(".py").replace("/", ".") for path in paths if path.startswith("rlcore/")]


def measured(*names: str) -> Any:
    done = subprocess.run([sys.executable, "-c", MEASURE, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_rlcore_takes_less_than_two_seconds_and_brings_in_no_heavy_library() -> None:
    found = measured()
    assert found["seconds"] < 2.0
    assert not {"torch", "transformers", *NEVER, *LAZY} & set(found["light"])


@pytest.mark.slow  # every module of the library is imported anew; the import contracts hold the same of its own imports
def test_no_module_of_rlcore_brings_in_orchestration_tracking_or_an_engine() -> None:
    found = measured(*library())
    assert {"torch", "transformers"} <= set(found["all"])  # the watch sees something
    assert not (NEVER | LAZY) & set(found["all"])


METADATA = """Metadata-Version: 2.4
Name: rlcore
Version: 9.9
Requires-Dist: torch>=2.11
Requires-Dist: only-elsewhere; sys_platform == "none"
Provides-Extra: gguf
Requires-Dist: gguf>=0.19; extra == "gguf"
Requires-Dist: accelerate>=1; extra == "gguf"
Requires-Dist: only-there; sys_platform == "none" and extra == "gguf"
Provides-Extra: lora
Requires-Dist: peft>=0.18; extra == "lora"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "rlcore-9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def words(*names: str) -> list[str]:
    return shlex.split(install_command(*names))


def test_the_command_names_the_origin_of_the_installation(installed: Path, tmp_path: Path) -> None:
    wheel, checkout = tmp_path / "my wheels" / "rlcore-9.9-py3-none-any.whl", tmp_path / "clone"
    wheel.parent.mkdir()
    wheel.touch()
    checkout.mkdir()
    git = {"vcs_info": {"vcs": "git", "commit_id": "abc"}}
    cases = (
        ({"url": wheel.as_uri(), "archive_info": {}}, [f"{wheel}[gguf,lora]"]),
        ({"url": checkout.as_uri(), "dir_info": {}}, [f"{checkout}[gguf,lora]"]),
        ({"url": checkout.as_uri(), "dir_info": {"editable": True}}, ["--editable", f"{checkout}[gguf,lora]"]),
        ({"url": "https://h.invalid/r.git", **git}, ["rlcore[gguf,lora] @ git+https://h.invalid/r.git@abc"]),
        ({"url": "https://h.invalid/r.whl", "archive_info": {}}, ["rlcore[gguf,lora] @ https://h.invalid/r.whl"]),
        ({"url": (tmp_path / "gone.whl").as_uri()}, ["gguf>=0.19", "accelerate>=1", "peft>=0.18"]),
    )
    assert words("lora") == ["pip", "install", "rlcore[lora]"]  # no record: from an index
    for origin, wanted in cases:
        (installed / "direct_url.json").write_text(json.dumps(origin))
        assert words("gguf", "lora") == ["pip", "install", *wanted]


def test_requirements_are_those_of_this_platform_for_the_library_or_an_extra(installed: Path) -> None:
    assert [str(each.name) for each in requirements()] == ["torch"]
    assert [str(each.name) for each in requirements("gguf")] == ["gguf", "accelerate"]
    assert extras.extra_names() == ("gguf", "lora")
    assert describe_installation() == f"9.9 ({ROOT / 'rlcore'})"


def test_make_is_named_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert make_command("setup") == "make setup"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(make_command("setup")) == ["make", "-C", str(ROOT), "setup"]
    assert engine_command() == make_command("engine")

    monkeypatch.setattr(extras, "_FOLDER", tmp_path / "site-packages" / "rlcore")
    assert make_command("setup") == ""
    lock = (ROOT / "infra" / "locks" / "engine.txt").read_text(encoding="utf-8")
    assert f"\n{engine_command().split()[-1]} " in lock


def test_no_message_names_a_package_that_an_index_does_not_have() -> None:
    sources = [path for folder in ("rlcore", "tasks", "flows", "infra") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in sources if re.search(r"pip install.{0,4}rlcore", path.read_text("utf-8"))] == []


KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RlcoreError)]


def test_a_message_has_what_where_and_how_to_fix_it() -> None:
    error = errors.DataError("row 3 has no prompt", where="data.jsonl:3", fix="add the column")
    assert str(error) == "row 3 has no prompt\n  where: data.jsonl:3\n  fix:   add the column"
    assert str(errors.DataError("row 3 has no prompt")) == "row 3 has no prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_kind_and_its_parts_when_it_crosses_processes(kind: type[RlcoreError]) -> None:
    # copy uses the same protocol as the way between processes, __reduce__.
    error = copy.copy(kind("what", where="where", fix="fix"))
    assert (type(error), error.what, error.where, error.fix) == (kind, "what", "where", "fix")


def test_special_errors_are_caught_with_their_family() -> None:
    assert issubclass(errors.StaleSamplerError, errors.SamplingError)
    assert issubclass(errors.NonFiniteError, errors.TrainingError)
