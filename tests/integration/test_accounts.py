"""People with users of MLflow, and clients of both servers on other machines, behind the proxy of infra/nginx.conf."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.infra.test_containers import INFRA, tool
from tests.integration.service_runs import ROOT, Services, free_ports, running_services, wait_until
from tests.waiting import LONG

pytestmark = pytest.mark.services

TOKEN = "t" * 32
HEADER = {"X-Rlcore-Client": TOKEN}
# What a person does, in order; the output says what the server refused. Needs a folder, and a model's name.
WORK = """
import json, sys
from pathlib import Path
from mlflow.utils.rest_utils import http_request
from rlcore.errors import ServiceError
from rlcore.tasks.store.settings import find_home, prepare_environment
from rlcore.tasks.promotion.champion import find_champion
from rlcore.tasks.tracking.runs import open_tracker
from tests.registered import promote, register_versions, roll_back
home, (folder, name) = find_home(), sys.argv[1:]
prepare_environment(home)
tracker = open_tracker(home)
print("reads", [each.name for each in tracker.client.search_experiments()])
found = find_champion(home, tracker, "theirs")
print("champion", found.version if found else None)
def refused(act):
    try:
        act()
    except ServiceError as error:
        print("refused", str(error).splitlines()[0])
    else:
        print("done")
def log():
    with tracker.start_run("team", "a run", tags={}) as run:
        run.log_metrics({"reward/mean": 1.0}, step=1)
def promote_own():
    first, second, third = register_versions(tracker, Path(folder), name)
    promote(home, tracker, first, over=None)
    promote(home, tracker, second, over=first)
    roll_back(home, tracker, name, version=2, reason="rude")
refused(log)
refused(promote_own)
if name != "theirs":
    client = tracker.client
    refused(lambda: client.set_registered_model_alias("theirs", "champion", "3"))
    refused(lambda: client.delete_registered_model_alias("theirs", "champion"))
    refused(lambda: client.set_registered_model_tag("theirs", "approvals", "0"))
    refused(lambda: client.delete_model_version_tag("theirs", "2", "rolled_back"))
    refused(lambda: client.delete_model_version("theirs", "1"))
    client.create_registered_model(f"{name}2")
    host, where = tracker.client._tracking_client.store.get_host_creds(), "/api/2.0/mlflow/registered-models/alias"
    question, kind = f"?name={name}2&alias=champion", {"Content-Type": "text/plain"}
    subject = json.dumps({"name": "theirs", "alias": "champion"})
    print(http_request(host, where + question, "DELETE", data=subject, extra_headers=kind).status_code)
"""


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with running_services() as made:
        made.python(WORK, str(made.home / "model"), "theirs", served=True)
        yield made


def login(services: Services, name: str, may: str) -> dict[str, str]:
    code = f"from infra.services.__main__ import main; raise SystemExit(main(['user', '{name}', '--may', '{may}']))"
    lines = services.python(code, served=True).splitlines()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))


def work(variables: Mapping[str, str], folder: Path, name: str) -> str:
    return python(WORK, variables | {"RLCORE_HOME": str(folder / "home")}, str(folder / "model"), name)


def python(code: str, variables: Mapping[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(variables), cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone(services: Services, variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in services.variables.items() if name != "RLCORE_HOME"} | dict(variables)


def test_nobody_but_the_worker_and_the_administrator_moves_a_champion(services: Services, tmp_path: Path) -> None:
    output = {}
    for name, may in (("ben", "read"), ("anna", "run")):
        (tmp_path / name).mkdir()
        output[name] = work(alone(services, login(services, name, may)), tmp_path / name, f"{name}s").splitlines()
        assert "team" in output[name][0]
        assert output[name][1] == "champion 1"
        assert len(output[name]) == 10
        assert all(f"does not allow this to the user {name}" in line for line in output[name][4:9]), output[name]
        assert output[name][9] == "400"  # one model in the address, for the check; another in the content, for the act
    assert "does not allow this to the user ben" in output["ben"][2]
    assert output["anna"][2] == "done"  # she logs runs
    assert services.champion("theirs") == "1"
    # MLflow lets whoever creates a model manage it, also its alias champion; the log names no such model.
    verified = services.python("from rlcore.flows.cli.app import main; main(['audit', 'verify'])", served=True)
    assert ("annas: version 1 is champion, and by the audit log no version is" in verified) == (
        output["anna"][3] == "done"
    )
    assert not [line for line in verified.splitlines() if line.startswith("theirs") and "outside of rlcore" in line]


def test_rights_are_taken_away_and_the_doctor_says_who_one_is(services: Services, tmp_path: Path) -> None:
    def doctor(variables: Mapping[str, str]) -> str:
        code = "from rlcore.flows.cli.app import main; main(['doctor', '--services'])"
        addresses = {"PREFECT_API_URL": services.clients["PREFECT_API_URL"]}
        lines = python(code, alone(services, variables | addresses) | {"RLCORE_HOME": str(tmp_path)}).splitlines()
        return next(line for line in lines if "MLflow server" in line)

    first, second = login(services, "cleo", "run"), login(services, "cleo", "read")
    assert "ok       MLflow server  " in doctor(second) and doctor(second).endswith("answers 200 to the user cleo")
    assert "does not let the user cleo in (401)" in doctor(first)  # her old password
    (tmp_path / "cleo").mkdir()
    assert "refused" in work(alone(services, second), tmp_path / "cleo", "theirs")
    assert login(services, "cleo", "nothing") == {}
    assert "does not let the user cleo in (401)" in doctor(second)


@pytest.fixture(scope="module")
def proxied(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a client on another machine, while nginx serves both servers with infra/nginx.conf."""
    folder = tmp_path_factory.mktemp("nginx")
    ports = free_ports(("prefect", "mlflow"))
    key = [tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"]
    subprocess.run([*key, *files], check=True, capture_output=True)
    (folder / "clients.map").write_text(f'"{TOKEN}" gpu-1;\n')
    text = (INFRA / "nginx.conf").read_text().replace("/etc/rlcore", str(folder)).replace("/var/log/nginx", str(folder))
    for name, (public, own) in {"prefect": ("4243", "4200"), "mlflow": ("5043", "5000")}.items():
        text = text.replace(f"listen {public}", f"listen {ports[name]}").replace(f":{own}", f":{services.ports[name]}")
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("proxy", "client_body", "fastcgi", "uwsgi", "scgi")
    )
    user = "" if os.geteuid() else "user root; "  # another user may not enter the folder
    (folder / "nginx.conf").write_text(f"{user}pid {folder}/pid; events {{}} http {{ {paths}\n{text}}}\n")
    command = [tool("nginx"), "-c", f"{folder}/nginx.conf", "-e", f"{folder}/error.log", "-g", "daemon off;"]
    nginx = subprocess.Popen(command)
    client = {
        "PREFECT_API_URL": f"https://localhost:{ports['prefect']}/api",
        "PREFECT_CLIENT_CUSTOM_HEADERS": json.dumps(HEADER),
        "MLFLOW_TRACKING_URI": f"https://localhost:{ports['mlflow']}",
        "SSL_CERT_FILE": f"{folder}/tls.crt",
        "REQUESTS_CA_BUNDLE": f"{folder}/tls.crt",
        "PREFECT_HOME": str(folder / "client"),
    }
    try:
        yield services.variables | services.clients | client
    finally:
        nginx.terminate()
        assert nginx.wait(LONG) == 0


@pytest.fixture
def run_there(proxied: dict[str, str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        variables = proxied | {"RLCORE_CODE": str(ROOT), "COLUMNS": "400"}
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=variables, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def status(variables: Mapping[str, str], path: str, headers: Mapping[str, str]) -> int:
    request = urllib.request.Request(variables["PREFECT_API_URL"].removesuffix("/api") + path, headers=dict(headers))
    https = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=variables["SSL_CERT_FILE"]))
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), https).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_proxy_admits_who_has_a_token_and_the_server_who_has_the_password(
    services: Services, proxied: dict[str, str]
) -> None:
    wait_until(lambda: status(proxied, "/api/health", HEADER) == 200, seconds=LONG, what="answered")
    page, password = "/api/version", services.let_in
    assert [status(proxied, page, each) for each in (password, HEADER, {**HEADER, **password})] == [401, 401, 200]
    assert status(proxied, "/api/health", {"X-Rlcore-Client": ""}) == 401
    assert status(proxied, "/dashboard", {**HEADER, **password}) == 404


def test_deployments_worker_and_doctor_work_through_the_proxy(
    services: Services, proxied: dict[str, str], run_there: Callable[..., str]
) -> None:
    run_there("-m", "infra.services", "tell")
    run_there("-m", "prefect", "--no-prompt", "work-pool", "create", "far", "--type", "process")
    file = str(INFRA / "prefect.yaml")
    run_there("-m", "prefect", "--no-prompt", "deploy", "-n", "gc", "--pool", "far", "--prefect-file", file)
    worker = subprocess.Popen(
        [sys.executable, "-m", "infra.worker", "--pool", "far", "--name", "far", "--type", "process"],
        env=proxied,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output = run_there("-m", "prefect", "deployment", "run", "gc/gc", "--watch")
        assert "finished successfully" in output
        lines = run_there("-m", "rlcore.flows", "doctor", "--services").splitlines()
        assert [line for line in lines if line.startswith("MISSING")] == [], lines
        assert f"{proxied['PREFECT_API_URL']} answers 200 to the user rlcore" in "\n".join(lines)
    finally:
        worker.terminate()
        worker.wait(LONG)
    (run,) = services.runs_of("gc")
    assert services.ask("prefect", f"api/flow_runs/{run['id']}")["work_pool_name"] == "far"


def test_a_user_of_mlflow_logs_through_the_proxy(services: Services, proxied: dict[str, str], tmp_path: Path) -> None:
    known = {**login(services, "dora", "run"), "MLFLOW_TRACKING_URI": proxied["MLFLOW_TRACKING_URI"]}
    certificate = {name: proxied[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")}
    lines = work(alone(services, known | certificate), tmp_path, "doras").splitlines()
    assert (lines[1], lines[2]) == ("champion 1", "done")
