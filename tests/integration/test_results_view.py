"""The columns of results in MLflow's page, checked in a browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker, results_links, save_results_view
from tests.http_servers import free_port, running

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
]


@pytest.fixture
def presets(tracked_home: Home) -> dict[str, str]:
    tracker, links = open_tracker(tracked_home), {}
    for name, accuracy in (("tiny", 0.2468), ("mine", 0.7531)):
        with tracker.start_run(name, f"{name} post-train", tags={}) as run:
            run.log_metrics({"accuracy/grpo": accuracy, "seconds": 321.5})
        save_results_view(run, ["accuracy/grpo"])
        links[name] = results_links(run)
    return links


@pytest.fixture
def server(tracked_home: Home, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    store = ("--backend-store-uri", tracked_home.tracking_uri, "--workers", "1")
    command = [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port)]
    with running(command, port, "/health", tmp_path / "log"):
        yield f"http://127.0.0.1:{port}/"


def shown(address: str, profile: Path) -> str:
    """The page's document after its requests are answered."""
    options = ("--headless=new", "--no-sandbox", "--no-proxy-server", "--window-size=1300,900")
    command = [
        str(CHROMIUM),
        *options,
        f"--user-data-dir={profile}",
        "--virtual-time-budget=60000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_results_of_a_preset_and_of_all_presets_are_columns_one_click_away(
    presets: dict[str, str], server: str, tmp_path: Path
) -> None:
    own, compared = (part.split(")")[0] for part in presets["mine"].split("](")[1:])
    page = shown(server + own, tmp_path / "one")
    assert "accuracy/grpo" in page and "0.7531" in page and "321.5" not in page
    page = shown(server + compared, tmp_path / "both")
    assert "0.7531" in page and "0.2468" in page and "tiny post-train" in page
