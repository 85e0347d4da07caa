"""Presets as text: a complete preset as TOML, and the page of all keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlcore.tasks.presets.key_reference import NAME, REQUIRED, UNSET, Key, Section, describe, origin_of

_WIDTH = 48  # width of key and value, before the comment
_HEAD = """# Settings

Every key of a preset.

- `rlcore config mine.toml` prints a complete preset with the source of each key.
- `rlcore config --schema > preset.schema.json` writes a JSON Schema for editors. The first line of a preset names it:
  `#:schema ./preset.schema.json`.
- A file with `extends = "tiny"` holds only what differs from that preset. Tables are merged key by key, lists are
  replaced. `without = ["stages.ppo", "promotion"]` leaves out what that one has.
- Any key can be set for one run: `rlcore run mine.toml --set stages.grpo.learning_rate=2e-6`.

What a graph of datasets and stages can say: [Recipes](recipes.md).
"""


def as_toml(sections: Sequence[Section], found: Mapping[str, str]) -> str:
    """Format sections of a preset as TOML that reads back equal; comments describe each key and name its source.

    ``found`` comes from :func:`rlcore.tasks.presets.key_reference.origins`.
    """
    return "\n".join(line for section in sections for line in _section_lines(section, found))


def as_markdown() -> str:
    """Return the page of all keys that a preset may have."""
    sections = describe()
    homes: dict[type, Section] = {}
    for section in sorted(sections, key=lambda each: each.path.count(".")):
        homes.setdefault(section.kind, section)
    return _HEAD + "".join(_markdown(section, homes[section.kind]) for section in sections)


def _section_lines(section: Section, found: Mapping[str, str]) -> Iterator[str]:
    table, _, last = section.path.rpartition(".")
    if section.path:
        yield f"[[{table}]]" if last.isdecimal() else f"[{section.path}]"
    yield from (f"# {line}".rstrip() for line in section.text.splitlines())
    for key in section.keys:
        file = origin_of(f"{section.path}.{key.name}".lstrip("."), found)
        comment = "; ".join(
            part for part in (key.type, _default(key), key.note, f"set in {file}" if file else "") if part
        )
        # TOML has no null: an absent value is a comment.
        line = f"# {key.name}: {UNSET}" if key.value == UNSET else f"{key.name} = {key.value}"
        yield f"{line:<{_WIDTH}}  # {comment}"
    yield from (f"# [{f'{section.path}.{name}'.lstrip('.')}]: {UNSET}" for name in section.nested)
    yield ""


def _default(key: Key) -> str:
    return REQUIRED if key.default == REQUIRED else f"default {key.default}"


def _markdown(section: Section, home: Section) -> str:
    heading = f"`[{section.path}]`{_kind_of(section)}" if section.path else "The top of the file"
    if section is not home:
        return (
            f"\n#### {heading}\nThe keys of `[{home.path}]` {'above' if home.path == section.path else ''}".rstrip()
            + ".\n"
        )
    level = "###" if "." in section.path.removesuffix(f".{NAME}") else "##"
    rows = "".join(map(_row, section.keys))
    table = f"\n| key | type | default | |\n|---|---|---|---|\n{rows}" if rows else ""
    return f"\n{level} {heading}\n{section.text}\n{table}"


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", key.type, key.default, key.note)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _kind_of(section: Section) -> str:
    """Return the kind of stage of a section."""
    is_stage = section.path == f"stages.{NAME}"
    return "".join(f" of kind = {key.type}" for key in section.keys if is_stage and key.name == "kind")
