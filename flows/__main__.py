"""The command ``rlcore``: the console script, and ``python -m rlcore.flows``.

It starts where the library alone is installed, and says there what the pipeline needs.
"""

from __future__ import annotations

import sys

from rlcore.extras import describe_installation, install_command, requirements


def main() -> int:
    """Run the command; return its exit code. In one line name the extra whose packages are missing."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{describe_installation()}\n")
        return 0
    try:
        from rlcore.flows.cli.app import main as command

        return command()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.replace("_", "-") not in {each.name.lower() for each in requirements("pipeline")}:
            raise
        sys.stderr.write(
            f"error (installation): rlcore {describe_installation()} lacks {package} of the extra pipeline: "
            f"{install_command('pipeline')}\n"
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
