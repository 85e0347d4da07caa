"""Commands about preset keys: show them, migrate them."""

from __future__ import annotations

import difflib
import json
import sys
from typing import Annotated

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Overrides, Preset


def config(
    preset: Preset = "tiny",
    key: Annotated[str, Parameter(help="A section or a key, such as stages.grpo.kl; default: all.")] = "",
    *,
    overrides: Overrides = (),
    markdown: Annotated[bool, Parameter(help="Print the page of all preset keys.")] = False,
    schema: Annotated[bool, Parameter(help="Print a JSON Schema of preset files, for editors.")] = False,
) -> int:
    """Print a complete preset as TOML: every key with its type, default, limits, comment, and source file.

    ```
    rlcore config mine.toml stages.grpo
    rlcore config tiny hardware.dtype
    rlcore config --schema > preset.schema.json      # first line of a preset: #:schema ./preset.schema.json
    ```
    """
    from rlcore.tasks.presets.key_reference import as_markdown, preset_schema

    if schema:
        sys.stdout.write(json.dumps(preset_schema(), indent=1) + "\n")
    else:
        sys.stdout.write(as_markdown() if markdown else _described(preset, key, overrides))
    return 0


def _described(preset: str, key: str, overrides: Overrides) -> str:
    from rlcore.config import to_dict
    from rlcore.flows.presets import FOLDER, open_preset, preset_path
    from rlcore.tasks.presets.key_reference import as_toml, describe, origins, select_keys
    from rlcore.tasks.presets.peers import meant

    config = open_preset(preset, overrides)
    sections = describe(config)
    found = select_keys(sections, key)
    if not found:
        known = [f"{section.path}.{each.name}".lstrip(".") for section in sections for each in section.keys]
        close = difflib.get_close_matches(key, [*known, *(section.path for section in sections)], n=3)
        nearest = f"did you mean {', '.join(close)}?" if close else f"rlcore config {preset} prints all of them"
        raise ConfigError(f"the preset has no section or key {key!r}", fix=meant(to_dict(config), key, None) or nearest)
    return as_toml(found, origins(preset_path(preset), FOLDER, overrides))
