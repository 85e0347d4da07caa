"""Optional parts of this installation: what each extra requires, and the command that adds it."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

_ENGINE = "vllm==0.32.0"  # as infra/locks/engine.txt has it
_FOLDER = Path(__file__).resolve().parent


def describe_installation() -> str:
    """Return the version, and the folder of the package."""
    return f"{metadata.version('rlcore')} ({_FOLDER})"


def requirements(*extras: str) -> tuple[Requirement, ...]:
    """Return what extras require on this platform beyond the library; without extras, the library's own.

    Raises:
        importlib.metadata.PackageNotFoundError: rlcore is not installed.
    """
    found = map(Requirement, metadata.requires("rlcore") or ())
    wanted = extras or ("",)
    return tuple(
        each
        for each in found
        if bool(extras) == ("extra" in str(each.marker))
        and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in wanted))
    )


def extra_names() -> tuple[str, ...]:
    """Return the names of all extras."""
    return tuple(metadata.metadata("rlcore").get_all("Provides-Extra") or ())


def install_command(*extras: str) -> str:
    """Return the ``pip`` command that adds extras to this installation, from where it came.

    That is the checkout, wheel, repository or package index; if a file is gone, the requirements themselves.
    """
    return shlex.join(("pip", "install", *_arguments(f"[{','.join(extras)}]", extras)))


def make_command(target: str) -> str:
    """Return the command of a target of the Makefile; empty if rlcore does not run from a checkout."""
    root = _FOLDER.parent
    if not (root / "Makefile").is_file():
        return ""
    return f"make {target}" if Path.cwd() == root else shlex.join(("make", "-C", str(root), target))


def engine_command() -> str:
    """Return the command that installs vLLM into ``.venv-engine``."""
    own = f"python -m venv .venv-engine && .venv-engine/bin/python -m pip install {_ENGINE}"
    return make_command("engine") or own


def _arguments(bracket: str, extras: tuple[str, ...]) -> tuple[str, ...]:
    origin = _origin()
    parts = urlsplit(origin.get("url", ""))
    if parts.scheme == "file" and "vcs_info" not in origin:
        path = unquote(parts.path)
        if not Path(path).exists():
            return tuple(f"{each.name}{each.specifier}" for each in requirements(*extras))
        is_editable = bool(origin.get("dir_info", {}).get("editable"))
        return (*("--editable",) * is_editable, path + bracket)
    if "vcs_info" in origin:
        source = origin["vcs_info"]
        return (f"rlcore{bracket} @ {source['vcs']}+{origin['url']}@{source['commit_id']}",)
    return (f"rlcore{bracket} @ {origin['url']}" if origin else f"rlcore{bracket}",)


def _origin() -> dict[str, Any]:
    """Return pip's record of the distribution's origin; empty for an index."""
    try:
        text = metadata.distribution("rlcore").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from a checkout by its path
        return {"url": _FOLDER.parent.as_uri(), "dir_info": {"editable": True}}
    found: dict[str, Any] = json.loads(text or "{}")
    return found
