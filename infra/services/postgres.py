"""PostgreSQL cluster in the services' folder: on loopback, with passwords, under a user that is not root."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from infra.services.layout import Layout, passwords
from rlcore.errors import ServiceError
from rlcore.tasks.operations.postgres import DATABASES, find_program, run_tool
from rlcore.tasks.operations.server_access import HOST
from rlcore.tasks.store.passwords import write_private
from rlcore.tasks.store.state import newest_dump

_USER = "postgres"  # the distribution's user; as root PostgreSQL does not run
_POLL_SECONDS, _SECONDS = 5.0, 60.0  # to connect, on a busy machine: for a question that is asked again, and for others


def command(layout: Layout) -> list[str]:
    """Return the command line of the server, without a socket file, so that all access needs a password."""
    options = {
        "listen_addresses": HOST,
        "port": str(layout.ports["postgres"]),
        "unix_socket_directories": "",
        "max_connections": "100",
    }
    settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return [find_program("postgres"), "-D", str(layout.cluster), *settings]


def identity() -> Mapping[str, Any]:
    """Return ``subprocess.Popen`` arguments to run as PostgreSQL's user if this process is root."""
    return {} if os.geteuid() else {"user": _USER, "group": _USER, "extra_groups": []}


def make_cluster(layout: Layout) -> None:
    """Create the cluster if there is none.

    Raises:
        ServiceError: PostgreSQL is not installed, or its user may not enter the folder.
    """
    if not os.geteuid():
        _let_through(layout)
    if (layout.cluster / "PG_VERSION").exists():
        return
    shutil.rmtree(layout.cluster, ignore_errors=True)  # left by a killed start
    layout.cluster.mkdir(mode=0o700)
    if not os.geteuid():
        _refuse_closed_folders(layout.cluster)
    secret = layout.root / ".postgres-password"
    write_private(secret, passwords(layout)[_USER])
    if not os.geteuid():
        _give_to_user(layout.cluster, secret)
    options = ["--username", _USER, "--pwfile", str(secret), "--auth", "scram-sha-256", "--encoding", "UTF8"]
    try:
        done = subprocess.run(
            [find_program("initdb"), "-D", str(layout.cluster), "--no-locale", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",  # the user may not enter root's folders
            **identity(),
        )
    finally:
        secret.unlink()
    layout.log("postgres").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        shutil.rmtree(layout.cluster)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServiceError(f"initdb failed: {last}", where=str(layout.log("postgres")))


def make_databases(layout: Layout) -> None:
    """Create a role and a database for Prefect and for MLflow, each with its own password, if missing.

    A first database begins with the newest dump in the state directory.

    Raises:
        ServiceError: a database that was here is gone, and an old dump would take its place.
    """
    asyncio.run(_make_databases(layout))


def is_ready(layout: Layout) -> bool:
    """Return True if the server answers with the stored password."""
    try:
        asyncio.run(_execute(layout, "SELECT 1", seconds=_POLL_SECONDS))
    except (OSError, TimeoutError, _driver().PostgresError):
        return False
    return True


async def _make_databases(layout: Layout) -> None:
    newest = newest_dump(layout.home) or layout.home
    for name in DATABASES:
        if not await _execute(layout, "SELECT 1 FROM pg_roles WHERE rolname = $1", name):
            # Passwords have only letters, digits, - and _, so they cannot end the quotes.
            await _execute(layout, f"CREATE ROLE {name} LOGIN PASSWORD '{passwords(layout)[name]}'")
        made, dump = layout.root / f"{name}.made", newest / f"{name}.dump"
        if not await _execute(layout, "SELECT 1 FROM pg_database WHERE datname = $1", name):
            if made.exists() and dump.exists():
                _refuse_old_dump(name, made, dump)
            await _make_database(layout, name, dump)
        made.touch()


def _refuse_old_dump(name: str, made: Path, dump: Path) -> NoReturn:
    age = datetime.fromtimestamp(dump.stat().st_mtime, UTC)
    raise ServiceError(
        f"the database {name} is gone, and the dump of {age:%Y-%m-%d %H:%M} UTC would take its place",
        where=str(dump),
        fix=f"bring the database back; or take the dump by removing {made}, or an empty database by removing the dump",
    )


async def _make_database(layout: Layout, name: str, dump: Path) -> None:
    """Create a database under another name, so that a killed start leaves no partial one."""
    new = f"{name}_new"
    await _execute(layout, f"DROP DATABASE IF EXISTS {new}")
    await _execute(layout, f"CREATE DATABASE {new} OWNER {name}")
    if dump.exists():
        options = (f"--dbname={new}", "--no-owner", "--no-comments", "--exit-on-error", str(dump))
        run_tool("pg_restore", name, port=layout.ports["postgres"], password=passwords(layout)[name], options=options)
    await _execute(layout, f"ALTER DATABASE {new} RENAME TO {name}")


async def _execute(layout: Layout, statement: str, *values: str, seconds: float = _SECONDS) -> list[Any]:
    connection = await _driver().connect(
        host=HOST,
        port=layout.ports["postgres"],
        user=_USER,
        password=passwords(layout)[_USER],
        database=_USER,
        timeout=seconds,
        ssl=False,
    )
    try:
        rows: list[Any] = await connection.fetch(statement, *values)
    finally:
        await connection.close()
    return rows


def _driver() -> Any:
    import asyncpg

    return asyncpg


def _let_through(layout: Layout) -> None:
    """Let PostgreSQL's user traverse the owner's state directory, without listing it."""
    for folder in (layout.home, layout.root) if layout.root.is_relative_to(layout.home) else ():
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH)


def _refuse_closed_folders(cluster: Path) -> None:
    closed = [folder for folder in reversed(cluster.parents) if not folder.stat().st_mode & 0o001]
    if closed:
        raise ServiceError(
            f"as root, PostgreSQL runs as the user {_USER!r}, who may not enter {closed[0]}",
            where=str(cluster),
            fix="set RLCORE_SERVICES to a folder that others may enter, such as /srv/rlcore, or chmod o+x this one",
        )


def _give_to_user(*paths: Path) -> None:
    user = pwd.getpwnam(_USER)
    for path in paths:
        os.chown(path, user.pw_uid, user.pw_gid)
