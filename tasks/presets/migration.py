"""Migration of a preset file: renamed keys and values are replaced in place; comments and layout stay."""

from __future__ import annotations

import codecs
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.tasks.presets.renamed import kinds_in, new_path, new_value, translated
from rlcore.tasks.presets.run import read_chain
from rlcore.tasks.store.storage import write_bytes

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_STRING = re.compile(r"\"\"\"(?:[^\\]|\\.)*?\"{3,5}|'''.*?'{3,5}|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'", re.DOTALL)
_BARE = re.compile(r"[^,\]}#\n]+")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_BLANKS = re.compile(r"[ \t]*")
_COMMENT = re.compile(r"[ \t]+(?=#)")


@dataclass(frozen=True)
class Span:
    """Key or value in the text of a preset.

    Attributes:
        path: Names of its tables and its own; a number for an item of a list.
        is_key: True for a key, False for a string value.
    """

    path: tuple[str, ...]
    begin: int
    end: int
    is_key: bool


def migrate_file(path: Path, *, library: Path) -> list[str]:
    """Rewrite a preset file completely or not at all; return a line for each change.

    ``library``: the folder of built-in presets that it may extend.
    Raises:
        ConfigError: It cannot be read, is not TOML, or has an old key next to its new name.
        StorageError: It cannot be written.
    """
    documents = read_chain(path, library)
    content = path.read_bytes()
    bom = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    text, changes = migrate(content.removeprefix(bom).decode(), kinds_in(*documents), where=str(path))
    if changes:
        mode = path.stat().st_mode
        write_bytes(bom + text.encode(), path.resolve())
        path.chmod(mode)
    return changes


def migrate(text: str, kinds: Mapping[str, str], *, where: str) -> tuple[str, list[str]]:
    """Return the text of a preset with current names, and a line for each change.

    Raises:
        ConfigError: It has an old key next to its new name.
    """
    edits = [edit for span in _Scanner(text).spans() if (edit := _edit(text, span, kinds))]
    changed = _applied(text, edits)
    try:
        migrated = tomllib.loads(changed)
    except tomllib.TOMLDecodeError as error:
        what = f"the preset has an old key and its new name: {error}"
        raise ConfigError(what, where=where, fix="leave out one of the two") from error
    if repr(migrated) != repr(translated(tomllib.loads(text), kinds)):  # NaN equals nothing
        what = "the preset's layout cannot be kept"
        raise ConfigError(what, where=where, fix="rename by hand the keys that rlcore plan names")
    return changed, [f"line {text.count(chr(10), 0, span.begin) + 1}: {note}" for span, _, note in edits]


def _edit(text: str, span: Span, kinds: Mapping[str, str]) -> tuple[Span, str, str] | None:
    """Return the replacement of a span with a note; None if nothing changes."""
    now = new_path(span.path, kinds)
    if span.is_key:
        return (span, now[-1], f"{'.'.join(span.path)} is now {'.'.join(now)}") if now[-1] != span.path[-1] else None
    value = _unquoted(text[span.begin : span.end])
    form = new_value(now, value, kinds)
    return (span, f'"{form}"', f"{'.'.join(now)} = {value!r} is now {form!r}") if form != value else None


def _applied(text: str, edits: Sequence[tuple[Span, str, str]]) -> str:
    """Return the text with all edits; a comment at a line's end keeps its column if blanks allow it."""
    growth: Counter[int] = Counter()
    pieces, position = [], 0
    for span, new, _ in edits:
        pieces += [text[position : span.begin], new]
        position = span.end
        growth[text.count("\n", 0, span.begin)] += len(new) - (span.end - span.begin)
    lines = "".join((*pieces, text[position:])).split("\n")
    for row, longer in growth.items():
        lines[row] = _realigned(lines[row], longer)
    return "\n".join(lines)


def _realigned(line: str, growth: int) -> str:
    found = [match for match in _COMMENT.finditer(line) if not _inside_string(line, match.start())]
    if not found:
        return line
    blanks = max(1, len(found[0][0]) - growth)
    return line[: found[0].start()] + " " * blanks + line[found[0].end() :]


def _inside_string(line: str, position: int) -> bool:
    return any(match.start() < position < match.end() for match in _STRING.finditer(line))


def _unquoted(text: str) -> str:
    return str(tomllib.loads(f"value = {text}")["value"])


class _Scanner:
    """Scanner of valid TOML that finds keys and strings."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lists: dict[tuple[str, ...], int] = {}  # lists of tables, each with the number of its last item

    def spans(self) -> Iterator[Span]:
        """Yield the keys and strings of the text, in order."""
        table: tuple[str, ...] = ()
        while self._skip(_BLANK) and self._at < len(self._text):
            if self._text[self._at] == "[":
                is_list = self._text.startswith("[[", self._at)
                self._at += 1 + is_list
                keys = list(self._keys((), self._in_last_items))
                yield from keys
                self._at += 1 + is_list
                path = keys[-1].path
                if is_list:
                    self._lists[path] = self._lists.get(path, -1) + 1
                table = self._in_last_items(path)
            else:
                yield from self._pair(table)

    def _in_last_items(self, path: tuple[str, ...]) -> tuple[str, ...]:
        return (*path, str(self._lists[path])) if path in self._lists else path

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match is not None

    def _keys(self, table: tuple[str, ...], within: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Iterator[Span]:
        """Yield the parts of a dotted key with their paths; ``within`` leads into the last item of a list of tables."""
        path, is_first = table, True
        while is_first or self._skip(_DOT):
            path = path if is_first else within(path)
            self._skip(_BLANKS)
            begin = self._at
            self._skip(_KEY)
            name = self._text[begin : self._at]
            path = (*path, _unquoted(name) if name[0] in "\"'" else name)
            yield Span(path, begin, self._at, is_key=True)
            is_first = False
        self._skip(_BLANKS)

    def _pair(self, table: tuple[str, ...]) -> Iterator[Span]:
        keys = list(self._keys(table, lambda path: path))
        yield from keys
        self._at += 1  # =
        yield from self._value(keys[-1].path)

    def _value(self, path: tuple[str, ...]) -> Iterator[Span]:
        self._skip(_BLANK)
        begin = self._at
        if self._text[begin] == "[":
            yield from self._items("]", path)
        elif self._text[begin] == "{":
            yield from self._items("}", path)
        elif self._skip(_STRING):
            yield Span(path, begin, self._at, is_key=False)
        else:
            self._skip(_BARE)

    def _items(self, end: str, path: tuple[str, ...]) -> Iterator[Span]:
        self._at += 1
        index = 0
        while self._skip(_BLANK) and self._text[self._at] != end:
            yield from self._pair(path) if end == "}" else self._value((*path, str(index)))
            index += 1
            self._skip(_BLANK)
            self._at += self._text[self._at] == ","
        self._at += 1
