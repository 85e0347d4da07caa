"""Ten secrets in the environment of a run under Prefect: none is in the home, its databases, its pages or its log."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO
from tests.judge_server import nonce_of, serving

RUN = """
import sys
from rlcore.tasks.store.settings import configure_environment, find_home
configure_environment(find_home())  # before Prefect reads its settings
from rlcore.flows.flows import evaluate
from rlcore.tasks.run.prefect_bridge import call_flow
call_flow(evaluate, preset="tiny", overrides=tuple(sys.argv[1:]), checkpoint="base")
"""
PLANTED = {  # what a run's environment holds, with {} for the secret
    "JUDGE_KEY": "{}",
    "HF_TOKEN": "hf_{}",
    "WANDB_API_KEY": "{}",
    "AWS_SECRET_ACCESS_KEY": "{}",
    "AWS_SESSION_TOKEN": "{}",
    "MLFLOW_TRACKING_PASSWORD": "{}",
    "PREFECT_API_AUTH_STRING": "rlcore:{}",
    "PGPASSWORD": "{}",
    "RLCORE_WEBHOOK_URL": "https://hooks.invalid/{}",
    "HTTPS_PROXY": "http://user:{}@127.0.0.1:9",
}


def texts(home: Path) -> Iterator[tuple[Path, bytes]]:
    """The bytes of every file of a home, and the values of each compressed table."""
    for path in home.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()
            if path.suffix == ".parquet":
                yield path, read_table(path).to_csv().encode()


@pytest.mark.slow
def test_no_planted_secret_is_found_in_anything_that_a_run_leaves(tmp_path: Path) -> None:
    home, planted = tmp_path / "home", {name: secrets.token_hex(12) for name in PLANTED}
    held = {name: PLANTED[name].format(secret) for name, secret in planted.items()}

    def leak(body: Mapping[str, Any]) -> str:
        return f"your key is {planted['JUDGE_KEY']}. <rating {nonce_of(body)}>5</rating>"

    with serving(leak) as (judge, url):
        options = f"{{base_url='{url}',model='m',api_key_env='JUDGE_KEY',retries=0}}"
        verifiers = f"evaluation.verifiers=[{{kind='judge',options={options}}}]"
        small = (*MICRO, "evaluation.num_problems=2", "evaluation.num_sampled_problems=1")
        variables = environment(home) | held | {"RLCORE_ENGINE": "prefect"}
        with (tmp_path / "output").open("wb") as output:  # no pipe, which a server that is left behind would hold
            subprocess.run(
                [sys.executable, "-c", RUN, *small, verifiers],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=ROOT,
                check=False,
            )
    assert judge.headers, (tmp_path / "output").read_text()
    assert f"Bearer {planted['JUDGE_KEY']}" in str(judge.headers)  # it was there to be leaked
    assert (home / "prefect" / "prefect.db").stat().st_size > 0
    assert (home / "mlflow.db").stat().st_size > 0
    left = [*texts(home), (Path("output"), (tmp_path / "output").read_bytes())]
    found = [(str(path), name) for path, text in left for name, each in planted.items() if each.encode() in text]
    assert found == []
