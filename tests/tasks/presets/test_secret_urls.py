"""Passwords in the addresses of presets and servers are refused, by their key and without their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.tasks.presets.run import read_preset
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.settings import Home, configure_environment

SECRET = "hunter2secret"
JUDGE = "stages.grpo.rewards=[{{kind='judge',options={{base_url='{}',model='m'}}}}]"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (JUDGE.format(f"https://me:{SECRET}@judge/v1"), "stages.grpo.rewards.0.options.base_url"),
        (JUDGE.format(f"https://judge/v1?api_key={SECRET}"), "stages.grpo.rewards.0.options.base_url"),
        (f"data.prompts.path=s3://key:{SECRET}@bucket/rows.jsonl", "data.prompts.path"),
        (f"data.prompts.path=https://host/rows?X-Amz-Signature={SECRET}", "data.prompts.path"),
        (f"model.path=https://user:{SECRET}@hub/model", "model.path"),
        (f"engine.urls=['http://u:{SECRET}@engine:8000']", "engine.urls.0"),
    ],
)
def test_an_address_with_a_secret_is_refused_by_its_key_and_not_repeated(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_preset("tiny", [override])
    said = str(raised.value)
    assert f"{key}: the address has a password or a key; name a variable of the environment" in said
    assert SECRET not in said


def test_a_preset_file_is_refused_before_its_other_errors_could_repeat_a_value(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(f'name = 3\nseed = "https://me:{SECRET}@host"\n')
    with pytest.raises(ConfigError) as raised:
        read_preset(preset)
    assert "seed: the address has a password" in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "https://host/path@2/file?version=3",
        "sqlite:////state/mlflow.db",
        "s3://bucket/key=1/rows.parquet",
        "postgresql+psycopg2://mlflow@postgres:5432/mlflow",
        "answer: 3:4@5",
        "https://host/monkey?page=2",
    ],
)
def test_addresses_without_a_secret_are_let_through(text: str) -> None:
    assert not has_secret(text)


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "PREFECT_API_URL"])
def test_the_address_of_a_server_with_a_password_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, f"https://me:{SECRET}@host/api")
    with pytest.raises(ConfigError) as raised:
        configure_environment(Home(tmp_path / "home"))
    assert raised.value.where == name
    assert SECRET not in str(raised.value)
