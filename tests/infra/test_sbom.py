"""The bill of materials: every pinned package is in it, with its licence and what it needs, and nothing of chance."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import pytest

from infra.sbom import LOCK, bill_of_materials, installed, read_pins


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return bill_of_materials(read_pins(LOCK), installed())


def test_every_pinned_package_is_in_it(bill: dict[str, Any]) -> None:
    pins = read_pins(LOCK)
    assert len(pins) > 200
    assert pins.keys() - {each["name"] for each in bill["components"]} == set()


def test_every_installed_package_is_in_it_with_its_version_and_what_it_needs(bill: dict[str, Any]) -> None:
    found = {each["name"]: each for each in bill["components"]}
    for name, package in installed().items():
        if name != "rlcore":
            assert (found[name]["version"], found[name]["scope"]) == (package.version, "required")
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    transformers, numpy = (found[name]["bom-ref"] for name in ("transformers", "numpy"))
    assert numpy in needs[transformers]
    assert {ref for all_refs in needs.values() for ref in all_refs} <= {each["bom-ref"] for each in found.values()}


def test_it_has_the_form_of_cyclonedx(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(references) == len(set(references))
    for each in bill["components"]:
        assert unquote(each["purl"]) == f"pkg:pypi/{each['name']}@{each['version']}"
        licences = each.get("licenses", [])
        assert all(set(one) <= {"expression", "license"} for one in licences)
        assert len(licences) <= 1 or not any("expression" in one for one in licences)


def test_most_packages_say_under_which_licence_they_are(bill: dict[str, Any]) -> None:
    told = [each for each in bill["components"] if each["scope"] == "required"]
    assert sum("licenses" in each for each in told) > 0.9 * len(told)


def test_a_pinned_package_that_is_not_installed_is_optional() -> None:
    bill = bill_of_materials({"a-package": "1.0"}, {})
    assert [(each["name"], each["version"], each["scope"]) for each in bill["components"]] == [
        ("a-package", "1.0", "optional")
    ]


def test_the_same_environment_gives_the_same_bill(bill: dict[str, Any]) -> None:
    assert bill_of_materials(read_pins(LOCK), installed()) == bill
    assert bill_of_materials({"a": "1"}, {})["serialNumber"] != bill["serialNumber"]
