"""Bill of materials of pinned and installed packages, in CycloneDX JSON: ``python -m infra.sbom [FILE]``.

It needs no network. A pinned package that is not installed, because its extra was not requested, has the scope
"optional". Equal environments give equal bytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import uuid
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "infra" / "locks" / "pipeline.txt"
PROJECT = "rlcore"


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("sbom.json")
    bill = bill_of_materials(read_pins(LOCK), installed())
    file.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{file}: {len(bill['components'])} packages\n")


def read_pins(path: Path) -> dict[str, str]:
    """Return names and versions of the lines of a lock that apply to this interpreter and platform."""
    lines = (line.rstrip("\\ ") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    pins = [pin for pin in map(Requirement, lines) if not pin.marker or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def installed() -> dict[str, Distribution]:
    """Return the packages of this environment by name."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(each.name): each for each in found}


def bill_of_materials(pins: Mapping[str, str], packages: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the bill as a JSON value."""
    versions = dict(pins) | {name: each.version for name, each in packages.items()}
    project = versions.pop(PROJECT, "0")
    references = {name: f"pkg:pypi/{name}@{quote(version)}" for name, version in sorted(versions.items())}
    components = [
        {
            "type": "library",
            "bom-ref": reference,
            "name": name,
            "version": versions[name],
            "purl": reference,
            "scope": "required" if name in packages else "optional",
            **_licences(packages.get(name)),
        }
        for name, reference in references.items()
    ]
    dependencies = [
        {"ref": references[name], "dependsOn": sorted(references[each] for each in _needs(package) & references.keys())}
        for name, package in sorted(packages.items())
        if name in references
    ]
    body = {
        "metadata": {"component": {"type": "application", "name": PROJECT, "version": project}},
        "components": components,
        "dependencies": dependencies,
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return head | body


def _licences(package: Distribution | None) -> dict[str, Any]:
    """Return the licenses of a package: an SPDX expression, else its own text."""
    if package is None:
        return {}
    values = package.metadata.json
    if "license_expression" in values:
        return {"licenses": [{"expression": values["license_expression"]}]}
    classes = (each.rpartition(" :: ")[2] for each in values.get("classifier", []) if each.startswith("License ::"))
    words = str(values.get("license", "")).strip().splitlines()[:1]  # some packages put the whole text there
    names = list(classes) or words
    return {"licenses": [{"license": {"name": name}} for name in names]} if names else {}


def _needs(package: Distribution) -> set[str]:
    """Return the requirements of a package here, without its extras."""
    asked = map(Requirement, package.requires or [])
    return {canonicalize_name(each.name) for each in asked if not each.marker or each.marker.evaluate({"extra": ""})}


if __name__ == "__main__":
    main()
