"""Databases of ``make services``: their folder, and dumps by PostgreSQL's own tools.

The services load the newest dump when they create a database (``infra/services/postgres.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import ServiceError
from rlcore.tasks.operations.server_access import HOST

FOLDER = "RLCORE_SERVICES"  # set by the user
DATABASES = ("mlflow", "prefect")  # each owned by a role of its name


def services_folder(home: Path) -> Path:
    """Return the folder of the services of a state directory: ``RLCORE_SERVICES``, else ``services/`` in it."""
    return Path(os.environ.get(FOLDER) or home / "services").absolute()


def dump_databases(home: Path, folder: Path) -> None:
    """Dump the databases of a state directory's services, if there are any, to ``<database>.dump`` in ``folder``.

    Raises:
        ServiceError: PostgreSQL is not running.
    """
    services = services_folder(home)
    if not (services / "passwords.json").exists():
        return
    port = json.loads((services / "layout.json").read_text(encoding="utf-8"))["ports"]["postgres"]
    passwords = json.loads((services / "passwords.json").read_text(encoding="utf-8"))
    for name in DATABASES:
        options = (f"--dbname={name}", "--format=custom", f"--file={folder / name}.dump")
        run_tool("pg_dump", name, port=port, password=passwords[name], options=options)


def run_tool(tool: str, role: str, *, port: int, password: str, options: Sequence[str]) -> None:
    """Run ``pg_dump`` or ``pg_restore`` as the owner of a database; its password is in the environment alone.

    Raises:
        ServiceError: the tool failed.
    """
    access = (f"--host={HOST}", f"--port={port}", f"--username={role}", "--no-password")
    done = subprocess.run(
        [find_program(tool), *access, *options],
        env=os.environ | {"PGPASSWORD": password},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServiceError(
            f"{tool} of the database {role} failed: {last}", fix="start the services: python -m infra.services up"
        )


def find_program(name: str) -> str:
    """Return the path of a program of PostgreSQL.

    Raises:
        ServiceError: PostgreSQL is not installed.
    """
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))  # Debian keeps them out of the path
    found = shutil.which(name) or (installed[-1] if installed else None)
    if found is None:
        raise ServiceError("PostgreSQL is not installed", fix="run infra/install_postgres.sh as root")
    return str(Path(found).absolute())  # not resolved: Debian's pg_dump is a link to a program that reads its own name
