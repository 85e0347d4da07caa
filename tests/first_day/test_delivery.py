"""The wheel in new environments, and rlcore serve with the official client."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import openai
import pytest

from rlcore.tasks.store.settings import Home, configure_environment
from tests.flows.micro import MICRO
from tests.http_servers import free_port, running
from tests.registered import register_toy
from tests.waiting import LONG

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rlcore", "tasks", "flows", "data_contracts", "examples")  # as the images copy them
NOT_OURS = ("tasks", "flows", "data_contracts", "examples", "benchmarks", "tests")
PIPELINE = (
    "prefect",
    "mlflow",
    "pandera",
    "pandas",
    "pyarrow",
    "datasets",
    "matplotlib",
    "fastapi",
    "cyclopts",
    "peft",
)
MOST = 70  # packages of the library alone, those of CUDA among them
OWN = """extends = "chat"
name = "mine"
[model]
source = "folder"
path = "exported"
license = "Apache-2.0"
[data.prompts]
adapter = "prompts"
path = "rows.jsonl"
num_train = 40
num_eval = 16
max_tokens = 64
[stages.grpo]
num_iterations = 2
prompts_per_iteration = 2
rewards = [{ kind = "math" }, { kind = "my_rewards:brief", weight = 0.2 }]
sampling.max_new_tokens = 24
[evaluation]
num_problems = 8
max_new_tokens = 24
"""
REWARD = """
def brief(rollouts):
    return [1.0 if len(rollout.text) < 200 else 0.0 for rollout in rollouts]
"""
LIBRARY = """
import pathlib, sys
import rlcore
rlcore.import_model(rlcore.ModelConfig(source="scratch"), pathlib.Path("model"), seed=0)
exec(compile(pathlib.Path(sys.argv[1]).read_text(), "library.md", "exec"))
print(len(result.history), sorted(path.name for path in pathlib.Path("trained").iterdir()))
"""
LOAD = """
import mlflow
chat = mlflow.transformers.load_model("models:/mine-grpo/1")
print(chat([{"role": "user", "content": "1+2"}], do_sample=False, max_new_tokens=4))
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment with the wheel, and a folder of a user."""

    folder: Path
    work: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = ("PREFECT_", "MLFLOW_", "RLCORE_", "PYTHON", "VIRTUAL_ENV", "COVERAGE")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        line = [str(self.folder / "bin" / command[0]), *command[1:]]
        plain |= {"OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(line, cwd=self.work, env=plain, capture_output=True, text=True, check=False)


def uv(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "uv", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder on a disk: the usual one of tests may be in memory, which environments would fill."""
    with tempfile.TemporaryDirectory(prefix="rlcore-wheel-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    source = place / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    uv("build", "--quiet", "--wheel", "--out-dir", str(place / "dist"), str(source))
    (built,) = (place / "dist").glob("*.whl")
    return built


def install(place: Path, name: str, wanted: str) -> Environment:
    made = Environment(folder=place / name, work=place / f"{name}-work")
    uv("venv", "--quiet", "--python", sys.executable, str(made.folder))
    (packages,) = made.folder.glob("lib/python*/site-packages")
    torch = metadata.distribution("torch")
    for top in {file.parts[0] for file in torch.files or ()} - {"..", "__pycache__"}:
        there = Path(str(torch.locate_file(top)))
        if top.endswith(".dist-info"):
            shutil.copytree(there, packages / top)
        else:
            (packages / top).symlink_to(there)
    uv("pip", "install", "--quiet", "--python", str(made.folder), wanted)
    made.work.mkdir()
    for module in NOT_OURS:
        (made.work / f"{module}.py").write_text("raise ImportError('a file of the user')\n")
    (made.work / "rlcore.toml").write_text("x = 1\n")
    return made


@pytest.fixture(scope="module")
def light(place: Path, wheel: Path) -> Environment:
    return install(place, "light", str(wheel))


@pytest.fixture(scope="module")
def full(place: Path, wheel: Path) -> Environment:
    return install(place, "full", f"{wheel}[pipeline]")


def installed(environment: Environment) -> set[str]:
    """The names of the packages, without torch's CUDA libraries."""
    code = "import importlib.metadata as m; print(*(each.name.lower() for each in m.distributions()))"
    return set(environment.run("python", "-I", "-c", code).stdout.split())


def test_the_library_alone_trains_as_its_page_says_and_has_no_package_of_the_pipeline(light: Environment) -> None:
    names = installed(light)
    assert not names & set(PIPELINE)
    assert len(names) <= MOST
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    (light.work / "page.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    done = light.run("python", "-c", LIBRARY, "page.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10 [")
    assert "'model.safetensors'" in done.stdout


def test_the_command_says_in_one_line_what_the_library_alone_lacks(light: Environment, wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert light.run("rlcore", "--version").stdout.startswith(f"{version} ({light.folder}/lib/")
    done = light.run("rlcore", "plan", "tiny")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"of the extra pipeline: pip install '{wheel}[pipeline]'")


def test_the_package_is_typed_for_its_users(light: Environment) -> None:
    assert len(list(light.folder.glob("lib/python*/site-packages/rlcore/py.typed"))) == 1


def test_doctor_names_no_makefile_and_looking_creates_nothing(full: Environment) -> None:
    before = sorted(full.work.iterdir())
    doctor, plan, show = (full.run("rlcore", *words) for words in (("doctor",), ("plan", "tiny"), ("show", "tiny")))
    assert (doctor.returncode, plan.returncode, show.returncode) == (0, 0, 1), doctor.stdout + plan.stderr + show.stderr
    assert not re.search(r"\bmake [a-z]", doctor.stdout + plan.stdout)
    assert f"no results in {full.work / '.rlcore'}" in show.stdout
    assert sorted(full.work.iterdir()) == before


def test_the_demo_and_an_own_preset_run_in_a_folder_of_the_user(full: Environment) -> None:
    settings = [part for each in MICRO for part in ("--set", each)]
    rows = (
        {
            "prompt_id": f"q{number}",
            "messages": [{"role": "user", "content": f"{number % 10}+{number // 10}"}],
            "reference": str(number % 10 + number // 10),
            "task": "sums",
        }
        for number in range(60)
    )
    (full.work / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (full.work / "my_rewards.py").write_text(REWARD)
    (full.work / "mine.toml").write_text(OWN)
    for command in (
        ("run", "tiny", *settings),
        ("export", "tiny-grpo/1", "exported"),
        ("run", "mine.toml"),
        ("show", "mine.toml"),
        ("lineage", "mine-grpo/1"),
    ):
        done = full.run("rlcore", *command, RLCORE_ENGINE="inline" if "mine.toml" in command else "prefect")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "mlflow.utils.environment" not in done.stderr  # warns in an environment without pip
    uri = f"sqlite:///{full.work / '.rlcore' / 'mlflow.db'}"
    loaded = full.run("python", "-P", "-c", LOAD, MLFLOW_TRACKING_URI=uri)
    assert loaded.returncode == 0, loaded.stderr


NAME, TOKEN, CLIENTS = "toy-sft/1", "a-token-of-fifty-clients", 50


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The official client of a model of 128 positions, served by the command."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    home = Home(folder / "home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("RLCORE_HOME", str(home.root))
        patch.setenv("RLCORE_SERVE_TOKEN", TOKEN)
        patch.setenv("OMP_NUM_THREADS", "1")
        configure_environment(home)
        register_toy(home)
        command = [sys.executable, "-m", "rlcore.flows", "serve", NAME, "--port", str(port), "--engine", "native"]
        url = f"http://127.0.0.1:{port}/v1"
        with (
            running(command, port, "/health", folder / "log"),
            openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=LONG) as made,
        ):
            yield made


def ask(client: openai.OpenAI, text: str = "3+4", **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=NAME, messages=messages, **more)  # type: ignore[call-overload]


def test_fifty_clients_at_once_each_get_their_answer(client: openai.OpenAI) -> None:
    def one(number: int) -> openai.types.chat.ChatCompletion:
        return ask(client, f"{number}+1", max_tokens=24, seed=number)

    alone = [one(number) for number in range(3)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(CLIENTS)))
    assert all(each.choices[0].finish_reason in ("stop", "length") for each in found)
    prompts = [[each.usage and each.usage.prompt_tokens for each in some] for some in (alone, found[:3])]
    assert prompts[0] == prompts[1]
