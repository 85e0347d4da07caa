"""Command line: ``python -m infra.services up|down|status`` (``make services`` does ``up``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infra.services.commands import bring_up, describe, take_down
from infra.services.layout import find_layout, saved_layout
from infra.services.migrate import migrate
from infra.services.provision import configure_servers
from infra.services.supervisor import supervise
from infra.services.users import NOTHING, RIGHTS, set_user
from rlcore.errors import RlcoreError
from rlcore.tasks.store.settings import configure_environment, find_home


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. A known error ends with its message, without a traceback."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked.command, asked)
    except RlcoreError as error:
        sys.stderr.write(f"\nerror ({type(error).__name__}): {error}\n")
        return 1


def _run(command: str, asked: argparse.Namespace) -> int:
    home = find_home()
    layout = find_layout(home.root)
    configure_environment(home)
    if command == "up":
        sys.stdout.write(bring_up(layout))
    elif command == "down":
        sys.stdout.write(take_down(layout))
    elif command == "status":
        text, all_ready = describe(saved_layout(layout))
        sys.stdout.write(text)
        return 0 if all_ready else 1
    elif command == "supervise":
        supervise(layout)
    elif command == "migrate":
        sys.stdout.write(migrate(saved_layout(layout)))
    elif command == "user":
        sys.stdout.write(set_user(saved_layout(layout), asked.name, asked.may))
    else:
        configure_servers()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.services", description="Servers of one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start missing services, register the deployments, show the addresses"),
        ("down", "end everything; the next start resumes active runs"),
        ("status", "show the services; exit code 1 if one is not ready"),
        ("migrate", "copy the embedded MLflow's runs, models and files to the server"),
        ("supervise", "keep the services up in the foreground (what `up` starts in the background)"),
        ("tell", "register deployments, queue limits and automations with the server that PREFECT_API_URL names"),
    ):
        commands.add_parser(name, help=text)
    user = commands.add_parser("user", help="add a user of MLflow, or change what one may do; show the new password")
    user.add_argument("name")
    user.add_argument("--may", choices=[*RIGHTS, NOTHING], default="read", help="nothing: remove the user")
    return parser


if __name__ == "__main__":
    sys.exit(main())
