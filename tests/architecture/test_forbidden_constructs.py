"""No line of ours unpickles, evaluates text, trusts remote code or starts a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.architecture.source_files import imported, modules, nodes

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"}
CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen", "pandas.read_pickle", "pd.read_pickle", "yaml.load"}
ARGUMENTS = {"weights_only": False, "trust_remote_code": True, "shell": True, "allow_pickle": True}


def passes_shards(path: str) -> bool:
    """Return True if a module computes with models that may be in shards."""
    imports = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return any(
        node.module == "rlcore.hardware.sharded" and "run_forward" in {a.name for a in node.names} for node in imports
    )


def walked(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


RUNNERS = ("rlcore/sandbox/runner.py",)  # runs programs, inside a box alone


def violations(code: Sequence[ast.AST]) -> Iterator[str]:
    for name, line in imported(code):
        if name.partition(".")[0] in PICKLERS:
            yield f"line {line}: import {name}"
    for node in code:
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in CALLS:
            yield f"line {node.lineno}: {called}()"
        for argument in node.keywords:
            given = argument.value.value if isinstance(argument.value, ast.Constant) else None
            if argument.arg in ARGUMENTS and given is ARGUMENTS[argument.arg]:
                yield f"line {node.lineno}: {argument.arg}={given}"


MODELS = {"model", "policy", "reference", "critic", "reward_model", "base", "backbone"}


def devices_asked(code: Sequence[ast.AST]) -> list[str]:
    asked = [node for node in code if isinstance(node, ast.Attribute) and node.attr == "device"]
    owners = [(node.lineno, getattr(node.value, "attr", getattr(node.value, "id", ""))) for node in asked]
    return [f"line {line}: {owner}.device" for line, owner in owners if owner.lstrip("_") in MODELS]


def test_what_passes_shards_asks_for_the_device_that_computes() -> None:
    """Weights may rest elsewhere (`distributed.cpu_offload`), which no machine without a GPU would notice."""
    passes = [path for path in modules() if passes_shards(path)]
    assert len(passes) >= 8
    assert [(path, asked) for path in passes for asked in devices_asked(nodes(path))] == []


def test_a_model_that_is_asked_for_its_device_is_found() -> None:
    asked = walked("x.to(model.device); critic.backbone.device; device_of(model); logits.device; self._policy.device")
    assert sorted(devices_asked(asked)) == [f"line 1: {name}.device" for name in ("_policy", "backbone", "model")]


def test_no_module_has_a_forbidden_construct() -> None:
    found = [(path, violation) for path in modules() for violation in violations(nodes(path))]
    assert [each for each in found if not (each[0] in RUNNERS and each[1].endswith(": exec()"))] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "def f():\n    import cloudpickle",
        "torch.load(path)",
        "load(path, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "eval('1 + 1')",
        "exec(code)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_walk_finds_each_forbidden_construct(code: str) -> None:
    assert len(list(violations(walked(code)))) == 1


@pytest.mark.parametrize(
    "code", ["model.eval()", "run(trust_remote_code=False)", "subprocess.run(['ls'])", "x.load(p)"]
)
def test_the_walk_leaves_harmless_code_alone(code: str) -> None:
    assert list(violations(walked(code))) == []
