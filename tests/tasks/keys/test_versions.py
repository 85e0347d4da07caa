"""The versions in a stage's key: those of the libraries that it uses, each named by a plan when it has changed."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.keys import key_inputs as module
from rlcore.tasks.keys.cache_keys import explain_miss
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import KeyInputs, Record

RL, EVALUATIONS = {"grpo", "ppo"}, {"evaluate_base", "evaluate_sft", "evaluate_grpo", "evaluate_ppo"}
PREPARING = {"prepare_prompts", "prepare_demonstrations", "prepare_preferences"}
GRADED = {*RL, *EVALUATIONS}
COMPUTING = {"import_sft", "sft", "reward_model", *GRADED, *PREPARING}
EIGHT_BITS = "stages.sft.optim.kind=adamw_8bit"
MADE = ("data.prompts.adapter=reasoning_gym", "data.prompts.options={tasks='chain_sum'}")
PAIRS = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
PROCEDURAL = (*PAIRS, "evaluation.verifiers=[{kind='procedural'}]")
GGUF = ("model.source=gguf", f"model.path={__file__}")  # any file: it is not read here


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    """Versions are looked up once in a process; here they change."""
    forget()
    yield
    forget()


def forget() -> None:
    module._installed.cache_clear()
    module._of_engine.cache_clear()


def ingredients(*overrides: str) -> dict[str, KeyInputs]:
    config = open_preset("tiny", overrides)
    return {stage.name: key_inputs(stage, config, {}) for stage in stages(config)}


usual = cache(ingredients)


def changed(before: dict[str, KeyInputs], after: dict[str, KeyInputs]) -> dict[str, str]:
    """Return the plan's reason for each stage that would run again."""
    ref, facts = ArtifactRef(kind="", uri="", sha256="", bytes=0), {"metrics": {}, "code": "", "environment": ""}
    found = {}
    for name, value in before.items():
        record = Record(key="", ref=ref, ingredients=value, created="", seconds=0.0, **facts)  # type: ignore[arg-type]
        if reason := explain_miss(after[name], [record]):
            found[name] = reason
    return found


@pytest.mark.parametrize(
    ("library", "overrides", "stages_of_it"),
    [
        ("torch", (), COMPUTING - PREPARING),
        ("tokenizers", (), COMPUTING),
        ("sympy", (), {*GRADED, "prepare_prompts"}),  # references are tried before they are learned from
        ("mpmath", (), {*GRADED, "prepare_prompts"}),
        ("numpy", (), {"reward_model", "compare", *GRADED, *PREPARING}),
        ("scipy", (), {"compare", *PREPARING}),
        ("peft", (), set()),
        ("peft", ("stages.grpo.update.lora.rank=2",), {"grpo"}),
        ("bitsandbytes", (), set()),
        ("bitsandbytes", (EIGHT_BITS,), {"sft"}),
        ("reasoning-gym", (), set()),
        ("reasoning-gym", MADE, {"prepare_prompts"}),
        (
            "reasoning-gym",
            (*PAIRS, "evaluation.verifiers=[{kind='procedural'}]"),
            {*EVALUATIONS, "prepare_preferences"},
        ),
        ("gguf", (), set()),
        ("gguf", GGUF, {"import_sft"}),
        ("datasets", (f"data.prompts.path=hub:a/b@{'0' * 40}",), {"prepare_prompts"}),
        ("matplotlib", (), set()),
        ("mlflow", (), set()),
        ("psutil", (), set()),
    ],
)
def test_a_new_version_of_a_library_computes_again_the_stages_that_use_it_and_is_named(
    library: str, overrides: tuple[str, ...], stages_of_it: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = usual(*overrides)
    real = metadata.version

    def other(name: str) -> str:
        return "99.9" if name.replace("_", "-") == library else real(name)

    monkeypatch.setattr(metadata, "version", other)
    module._installed.cache_clear()
    found = changed(before, ingredients(*overrides))
    assert found == dict.fromkeys(stages_of_it, f"versions changed: {library}")


def test_a_benchmark_hangs_on_the_harness(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").touch()
    settings = f"stages.bench={{kind='benchmark',policy='sft',folder='{tmp_path}',tasks=['sums']}}"
    assert "lm-eval" in ingredients(settings)["bench"]["versions"]


def test_a_library_of_an_own_reward_counts_for_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_versioned_words.py").write_text("def score(rollouts):\n    import hypothesis\n    return [0.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = ingredients("stages.grpo.rewards=[{kind='my_versioned_words:score',weight=1.0}]")
    assert {name for name in found if "hypothesis" in found[name]["versions"]} == {"grpo"}
    assert found["grpo"]["versions"]["hypothesis"] == metadata.version("hypothesis")


def test_what_is_imported_for_type_checkers_alone_does_not_count() -> None:
    assert not {name for name, found in ingredients().items() if "jaxtyping" in found["versions"]}


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """A server that tells its version, as vLLM's does, and what it tells."""
    words = {"version": "0.99.1"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/version" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(words).encode())

        def log_message(self, *_: object) -> None: ...

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", words
    serving.shutdown()
    serving.server_close()


def test_a_server_that_runs_is_asked_for_its_version(server: tuple[str, dict[str, str]]) -> None:
    url, words = server
    settings = ("stages.grpo.sampling.engine.kind=vllm", f"stages.grpo.sampling.engine.urls=['{url}']")
    before = ingredients(*settings)
    assert before["grpo"]["versions"]["vllm"] == "0.99.1"
    assert "vllm" not in before["ppo"]["versions"]
    words["version"] = "0.99.2"
    module._of_engine.cache_clear()
    assert changed(before, ingredients(*settings)) == {"grpo": "versions changed: vllm"}


def test_a_server_that_does_not_answer_has_an_unknown_version_which_is_never_that_of_a_result() -> None:
    settings = ("stages.grpo.sampling.engine.kind=vllm", "stages.grpo.sampling.engine.urls=['http://127.0.0.1:1']")
    assert ingredients(*settings)["grpo"]["versions"]["vllm"] == module.UNKNOWN


def test_the_interpreter_that_starts_the_servers_says_which_version_it_has(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.98.7\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    settings = ("stages.grpo.sampling.engine.kind=vllm", f"stages.grpo.sampling.engine.python={python}")
    assert ingredients(*settings)["grpo"]["versions"]["vllm"] == "0.98.7"
    without = (settings[0], f"stages.grpo.sampling.engine.python={sys.executable}")
    assert ingredients(*without)["grpo"]["versions"]["vllm"] == ""
