"""Versions of the libraries that a stage computes with: imports of its code and of custom code.

They are read from the sources that the stage reaches, so that no list is maintained. vLLM may be in another
environment: the interpreter that starts its servers, or a running server, reports its version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from rlcore.config import AgentConfig, EngineConfig, EpisodeConfig, RewardTerm, SamplingConfig
from rlcore.tasks.presets.chosen import idle_packages
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.stages import sampling_of, terms_of
from rlcore.tasks.store.code_hash import libraries
from rlcore.tasks.store.imports import NOTHING_CHOSEN, Chosen

UNKNOWN = "unknown"  # of a server that does not answer
_SECONDS = 20.0
_ASK = "from importlib.metadata import version; print(version('vllm'))"
# Libraries that determine tokens and digits, although no source imports them.
_BENEATH = {"transformers": ("tokenizers",), "sympy": ("mpmath",)}


def versions(module: str, sections: Sections, *, chosen: Chosen = NOTHING_CHOSEN) -> Mapping[str, str]:
    """Return the versions of Python and of the packages that a stage's ``module`` uses; empty: not installed.

    ``chosen``: the rows of tables that these sections use.
    """
    names = {name for each in (module, *_own_modules(sections)) for name in libraries(each, chosen=chosen)}
    names -= idle_packages(sections)
    names |= {name for each in names for name in _BENEATH.get(each, ())}
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    found |= {name: version for each in sorted(names) for name, version in _installed(each)}
    engine = _engine_of(sections)
    if engine is not None and engine.kind == "vllm":
        found["vllm"] = _of_engine(engine.python, engine.urls)
    return found


def _own_modules(sections: Sections) -> set[str]:
    """Return the custom modules that the sections name and this interpreter runs: rewards, environments, agents."""
    stage, sampling = sections.declared.get("stage"), _sampling_of(sections)
    named: list[AgentConfig | EpisodeConfig | RewardTerm | None] = [
        *(sections.declared.get(name) for name in ("episodes", "agent")),
        *((sampling.episodes, sampling.agent) if sampling else ()),
    ]
    named += (term for term in terms_of(stage).values() if not term.python) if stage else ()
    return {each.module for each in named if each is not None} - {""}


def _engine_of(sections: Sections) -> EngineConfig | None:
    """Return the engine of a stage with these sections; None if it samples nothing."""
    sampling = _sampling_of(sections)
    declared: EngineConfig | None = sections.declared.get("engine")
    return declared or (sampling.engine if sampling else None)


def _sampling_of(sections: Sections) -> SamplingConfig | None:
    return sampling_of(sections.stage) if "stage" in sections.declared else None


@cache
def _installed(module: str) -> tuple[tuple[str, str], ...]:
    """Return the installed packages that provide a module, with their versions."""
    try:
        return ((_name(module), metadata.version(module)),)
    except metadata.PackageNotFoundError:
        brought = sorted(set(_packages().get(module, ()))) if find_spec(module) else []
    return tuple((_name(each), metadata.version(each)) for each in brought) or ((_name(module), ""),)


@cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@cache
def _of_engine(python: str, urls: tuple[str, ...]) -> str:
    """Return the version of vLLM that servers run."""
    if urls:
        return " ".join(sorted({_of_server(url) for url in urls}))
    if not python:
        return _installed("vllm")[0][1]
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _of_server(url: str) -> str:
    from rlcore.sampling.vllm.client import EngineUnreachableError, address_of, call

    try:
        status, answer = call(address_of(url), "/version", None, seconds=_SECONDS)
    except EngineUnreachableError:
        return UNKNOWN
    known = answer.get("version") if status == 200 and isinstance(answer, Mapping) else None
    return known if isinstance(known, str) else UNKNOWN
