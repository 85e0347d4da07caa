from __future__ import annotations

import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.infra.documents import INFRA, has_digest, read, tool

DOCKERFILE = (INFRA / "docker" / "Dockerfile").read_text(encoding="utf-8")
STAGES = {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
FINAL = ("servers", "cpu", "gpu")


def instructions(stage: str) -> list[str]:
    """The lines of one stage."""
    text = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    return next(part for part in text if re.match(rf"\S+ AS {stage}\n", part)).splitlines()


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("hadolint"), str(INFRA / "docker" / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_an_exact_version() -> None:
    base = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert has_digest(f"python:{base[1]}")
    assert {base for base in STAGES.values() if base not in STAGES} == {"python:${PYTHON}"}


@pytest.mark.parametrize("stage", FINAL)
def test_an_image_ends_as_a_user_without_rights(stage: str) -> None:
    users = [line.split()[1] for line in instructions(stage) if line.startswith("USER ")]
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("stage", ["servers-packages", "packages"])
def test_packages_have_the_versions_of_the_lock(stage: str) -> None:
    installs = [line for line in instructions(stage) if "pip install" in line]
    assert installs
    assert all("--constraint locks/pipeline.txt" in line for line in installs)


def test_the_servers_can_keep_files_in_a_bucket() -> None:
    (install,) = [line for line in instructions("servers-packages") if "pip install" in line]
    assert {"mlflow", "boto3"} <= set(install.split())


def test_the_services_of_compose_are_stages_of_the_dockerfile() -> None:
    targets = {
        service["build"]["target"] for service in read("compose.yaml")["services"].values() if "build" in service
    }
    assert targets == set(FINAL)


def test_the_sandbox_is_in_the_images_that_run_pipelines() -> None:
    assert any("bubblewrap" in line for line in instructions("cpu"))
    assert STAGES["gpu"] == "cpu"


def test_everything_that_is_copied_in_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (INFRA.parent / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(
        r"^COPY (?:--\S+ )*(.+) \S+$", re.sub(r"^COPY --from=.*$", "", DOCKERFILE, flags=re.MULTILINE), re.MULTILINE
    )
    paths = {path.split("/")[0] for line in copied for path in line.split()}
    assert {"pyproject.toml", "rlcore", "infra"} <= paths <= sent


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_the_probe_tells_a_healthy_server_from_a_sick_one_and_from_none() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    assert probe(f"{address}/good") == 0
    assert probe(f"{address}/bad") == 1
    server.shutdown()
    server.server_close()
    assert probe(f"{address}/good") == 1


def probe(url: str) -> int:
    """The exit code of a container's health check."""
    command = [sys.executable, str(INFRA / "docker" / "probe.py"), url]
    return subprocess.run(command, capture_output=True, check=False).returncode
