"""``python -m tests.chaos.run``: kills whole runs at every kind of event, and compares their books (``make chaos``)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlcore.flows.presets import FOLDER
from tests.chaos.books import books, differences
from tests.chaos.chain import COMMAND, TABLES, TOY, run_killed
from tests.chaos.points import POINTS, all_kinds, kinds_of
from tests.flows.conftest import ROOT, environment, flows_arguments
from tests.flows.micro import ONE_LAYER
from tests.flows.retraining import write_data
from tests.flows.warm import run_warm
from tests.http_servers import free_port, running

SMALL = (
    *ONE_LAYER,
    "without=['stages.ppo']",
    "stages.sft.num_steps=6",
    "stages.reward_model.audit_folds=0",
    "stages.grpo.num_iterations=2",
    "stages.grpo.eval_every=1",
    "stages.grpo.sampling.max_new_tokens=8",
    "data.prompts.num_train=60",
    "data.demonstrations.num_train=100",
    "data.preferences.num_train=32",
    "data.preferences.num_eval=16",
    "evaluation.num_problems=16",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
)
EVERY_KIND = """extends = "retrain"
name = "every_kind"

[stages.dpo]
kind = "dpo"
init_from = "sft"
data = ["preferences"]
num_epochs = 1
batch_size = 4
learning_rate = 1e-4

[stages.difficulty]
kind = "difficulty"
policy = "sft"
data = ["prompts"]
num_samples = 2
num_prompts = 12
rewards = [{ kind = "math" }]
sampling = { max_new_tokens = 8 }

[stages.rejection]
kind = "rejection"
policy = "sft"
data = ["prompts"]
num_samples = 2
num_prompts = 24
num_eval = 2
choose = "best"
rewards = [{ kind = "math" }]
sampling = { max_new_tokens = 8 }

[stages.win_rate]
kind = "win_rate"
policy = "grpo"
baseline = "sft"
data = ["prompts"]
human_pairs = ["preferences"]
judge = { kind = "reward_model", stage = "reward_model" }
max_unjudged = 0.1
num_prompts = 8
sampling = { max_new_tokens = 8 }
"""
SKILLS = """
[stages.skills]
kind = "benchmark"
policy = "sft"
folder = "{folder}"
tasks = ["sum_choice"]
limit = 4
"""
STATEMENTS = range(5, 200, 20)  # of SQL, while MLflow's tables are made


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Commands that are run one after another in a home; ``share``: percent of the events that kill.

    ``points``: points of the stage runner that kill instead, each in a home of its own.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    share: int = 0
    points: tuple[str, ...] = ()
    call: str = COMMAND
    engine: str = "inline"


def scenarios(folder: Path, share: int) -> list[Scenario]:
    """Return the runs to kill; ``share`` is the fraction of the events of a post-train run and of a retraining."""
    data = write_data(folder / "data")
    short = (
        "stages.sft.num_steps=6",
        "stages.sft.optim.warmup_steps=1",
        "retrain.min_accuracy=0.0",
        "retrain.min_agreement=0.0",
    )
    retrain = [part for override in (*data, *short) for part in ("--set", override)]
    every = write_preset(folder / "every_kind.toml")
    each_kind = tuple(part for override in (*data, *short) for part in ("--set", override))
    return [
        Scenario(
            name="every kind at every point",
            commands=(
                ("run", "--preset", every, *each_kind),
                ("retrain", "--preset", every, *each_kind),
                ("retrain", "--preset", every, *each_kind, "--set", "stages.grpo.learning_rate=1e-8"),
            ),
            points=tuple(POINTS),
        ),
        Scenario(name="toy", commands=((),), share=100, call=TOY),
        Scenario(name="toy under Prefect", commands=((),), share=30, call=TOY, engine="prefect"),
        Scenario(name="post-train", commands=(tuple(flows_arguments("run", *SMALL)),), share=share),
        Scenario(
            name="extended",
            commands=tuple(
                tuple(flows_arguments("run", *SMALL, f"stages.grpo.num_iterations={count}")) for count in (2, 4)
            ),
            share=share,
        ),
        Scenario(
            name="retrain and promote",
            commands=(
                # Twice: a command that is killed after its promotion finds a champion when it is repeated.
                ("retrain", "--preset", "retrain", *retrain),
                ("retrain", "--preset", "retrain", *retrain),
                ("retrain", "--preset", "retrain", *retrain, "--set", "stages.grpo.learning_rate=1e-8"),
            ),
            share=share,
        ),
    ]


def write_preset(path: Path) -> str:
    skills = SKILLS.format(folder=FOLDER.parent / "skills") if find_spec("lm_eval") else ""
    path.write_text(EVERY_KIND + skills, encoding="utf-8")
    return str(path)


def judge(scenario: Scenario, folder: Path, *, seed: int, variables: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the number of kills of a scenario, and the differences of its books from those of an undisturbed run."""
    undisturbed, kills, wrong = folder / "undisturbed", 0, list[str]()
    folder.mkdir()
    env = {"RLCORE_ENGINE": scenario.engine, **variables}
    for command in scenario.commands:
        done = run_warm(command, environment(undisturbed) | env, ROOT, call=scenario.call)
        assert done.returncode == 0, done.stderr
    for plan in scenario.points or (f"{scenario.share}:{seed}",):
        killed, dead = folder / f"killed-{plan.partition(':')[0]}", set[str]()
        for number, command in enumerate(scenario.commands):
            ledger = killed.with_name(f"{killed.name}-events-{number}")
            kills += run_killed(command, killed, ledger, plan=plan, variables=env, call=scenario.call)
            dead |= kinds_of(ledger) if scenario.points else set()
        missed = all_kinds() - dead if scenario.points else set[str]()
        wrong += [f"{plan}: no stage of the kind {kind} has died" for kind in sorted(missed)]
        wrong += [f"{plan}: {line}" for line in differences(books(undisturbed), books(killed))]
    return kills, wrong


def kill_while_tables_are_made(folder: Path) -> tuple[int, list[str]]:
    """Kills on the first start of a home, between statements of SQL; whether the next start then works."""
    faults = []
    for statement in STATEMENTS:
        env = environment(folder) | {"TEST_NO_DATABASE": "1"}
        killed = run_warm([str(statement)], env, ROOT, call=TABLES)
        faults += [] if killed.returncode == -9 else [f"statement {statement}: {killed.stderr}"]
    done = run_warm(["0"], env, ROOT, call=TABLES)
    left = [path.name for path in folder.glob("*mlflow.db*") if path.name != "mlflow.db"]
    return len(STATEMENTS), [*faults, *left, *([] if done.returncode == 0 else [done.stderr])]


@contextmanager
def prefect_server(folder: Path) -> Iterator[dict[str, str]]:
    port = free_port()
    folder.mkdir()
    command = [str(Path(sys.executable).with_name("prefect")), "server", "start", "--port", str(port), "--no-ui"]
    variables = ["env", f"PREFECT_HOME={folder}", "PREFECT_SERVER_ANALYTICS_ENABLED=false"]
    with running([*variables, *command], port, "/api/health", folder / "log"):
        yield {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}


def main() -> int:
    """Run all scenarios; 1 if any book differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=10, help="percent of the events of the long scenarios that kill")
    parser.add_argument("--seed", type=int, default=0, help="which events these are")
    parser.add_argument("--only", default="", help="the scenario to run")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = False
    with tempfile.TemporaryDirectory(prefix="rlcore-chaos-") as name:
        folder = Path(name)
        for scenario in [None, *scenarios(folder, given.share)]:
            label, began = scenario.name if scenario else "first start", time.monotonic()
            if given.only not in ("", label):
                continue
            place = folder / label.replace(" ", "-")
            if scenario is None:
                kills, wrong = kill_while_tables_are_made(place)
            elif scenario.engine == "prefect":
                with prefect_server(folder / "server") as variables:
                    kills, wrong = judge(scenario, place, seed=given.seed, variables=variables)
            else:
                kills, wrong = judge(scenario, place, seed=given.seed, variables={})
            seconds = time.monotonic() - began
            sys.stdout.write(f"{label}: {kills} kills, {len(wrong)} differences, {seconds:.0f} s\n")
            sys.stdout.write("".join(f"  {line}\n" for line in wrong))
            sys.stdout.flush()
            failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
