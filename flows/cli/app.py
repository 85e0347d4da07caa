"""The command ``rlcore``: one parser for the console script, ``python -m rlcore.flows`` and the Makefile.

A command is a function of this folder: its signature has the arguments, its docstring is the help. It imports what it
needs when it runs, so that ``--help`` and completion are quick.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from rlcore.errors import ConfigError, RlcoreError
from rlcore.flows.cli import inspection, models, operation, training
from rlcore.tasks.store.settings import BudgetReachedError

USAGE_ERROR, FAILURE, BUDGET = 2, 1, 3
_MAX_NAME = 200  # characters of a path in a message

HELP = """Improve a language model with online reinforcement learning.

```
rlcore run                                     the demo: a small model from scratch, minutes on two cores
rlcore config mine.toml                        every key of a preset with its meaning
rlcore plan mine.toml                          stages that would run, and why
rlcore run mine.toml --set seed=1              your own preset with one changed key
rlcore promote mine.toml                       promote the new model if it is better than the champion
rlcore export mine-grpo/1 exported             a folder for transformers, vLLM and model hubs
```

A PRESET is the name of a built-in one (tiny, smollm2, reasoning, ...) or the path of a .toml file. rlcore skips cached
stages and resumes interrupted runs. State is in .rlcore, or in RLCORE_HOME; RLCORE_ENGINE=inline runs without the
Prefect API. Exit codes: 0 done, 1 failed, 2 wrong usage or preset, 3 budget reached, 130 interrupted.
"""


def _version() -> str:
    from rlcore.extras import describe_installation

    return describe_installation()


app = App(
    name="rlcore",
    help=HELP,
    help_format="markdown",
    version=_version,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative="", show_choices=True),
)
_TRAIN, _MODELS, _INSPECT, _OPERATE = map(Group.create_ordered, ("Train", "Models", "Inspect", "Operate"))
for _group, _commands in (
    (_TRAIN, (training.run, training.plan, training.retrain, training.validate)),
    (_MODELS, (models.promote, models.rollback, models.export, models.serve, models.lineage, models.reproduce)),
    (_INSPECT, (inspection.show, inspection.config, inspection.ui, inspection.doctor, inspection.agent_check)),
    (_OPERATE, (operation.approve, operation.reject, operation.audit)),
    (_OPERATE, (operation.gc, operation.dump, operation.upgrade)),
):
    for _command in _commands:
        app.command(_command, group=_group)
app.register_install_completion_command(help="Install shell completion.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. A known error ends with its message, without a traceback.

    If the reader of the output has left (``rlcore config | head``), the command ends silently, as by SIGPIPE.
    """
    if arguments is None:
        _add_cwd_to_path()
    try:
        code = app(None if arguments is None else list(arguments)) or 0
        sys.stdout.flush()
        return code
    except CycloptsError as error:
        return _refuse("usage", _usage_error(error), USAGE_ERROR)
    except BudgetReachedError as error:
        return _refuse("budget", str(error), BUDGET)
    except RlcoreError as error:
        return _refuse(type(error).__name__, str(error), USAGE_ERROR if isinstance(error, ConfigError) else FAILURE)
    except OSError as error:  # a full disk, a name that is too long, no permission
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 128 + signal.SIGPIPE
        named = f": {str(error.filename)[:_MAX_NAME]}" if error.filename else ""
        return _refuse("the operating system", f"{error.strerror or error}{named}", FAILURE)
    except UnicodeEncodeError as error:  # bytes of the command line
        return _refuse("usage", f"not UTF-8: {error.object[error.start :][:_MAX_NAME]}", USAGE_ERROR)
    except KeyboardInterrupt as error:
        from rlcore.tasks.run.interrupts import end_interrupted

        return end_interrupted(error)


def _add_cwd_to_path() -> None:
    """Let presets name functions of modules in the current folder, which a console script does not see.

    The folder comes last in the search path.
    """
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))


def _usage_error(error: CycloptsError) -> str:
    text, fix = str(error), "see rlcore --help, or --help after the command"
    if isinstance(error, UnusedCliTokensError):
        tokens = error.unused_tokens or []
        text, versions = f"unexpected: {' '.join(tokens)}", [token for token in tokens if token.isdigit()]
        fix = f"write a version as name/{versions[0]}; {fix}" if versions else fix
    return f"{text}\n  fix:   {fix}"


def _is_unread() -> bool:
    """Return True if the reader of the output has left; then discard what is still to be written."""
    output = select.poll()
    output.register(sys.stdout, 0)  # errors alone
    if has_left := bool(output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_left


def _refuse(kind: str, text: str, code: int) -> int:
    shown = "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    sys.stderr.write(f"\nerror ({kind}): {shown}\n")  # external names and values, without control codes of a terminal
    return code
