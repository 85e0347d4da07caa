"""Parser of answers: a value, a list, a tuple, an interval, a relation, words.

Texts are split at brackets and a few signs; formulas are parsed by :mod:`rlcore.rewards.mathematics.reader`. Any other
text is compared as text in canonical spelling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rlcore.rewards.mathematics.formula import (
    Choice,
    Combined,
    FormulaError,
    Grid,
    Item,
    Items,
    Known,
    Named,
    Node,
    Relation,
    Rounded,
    Span,
    Text,
    Value,
    number,
    read_notation,
)
from rlcore.rewards.mathematics.reader import parse_formula
from rlcore.rewards.mathematics.spelling import ROW_END, canonical, closing_bracket, without_degrees
from rlcore.rewards.units import parse_number, parse_quantity, scale_words, separate_unit

_AND_OR = re.compile(r"(?:,? ?(?:\\text\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])),?)")
_LIST = re.compile(rf"{_AND_OR.pattern}|[,;]")
_SEMICOLON = re.compile(";")
_ORDER = re.compile(r"\\(?:le|ge|ne|in|approx)(?![a-z])|[<>=]")
_SET_SIGN = re.compile(r"\\(?:cup|cap|setminus)(?![a-z])")
_COLON = re.compile(":")
_CONDITION = re.compile(r"\\mid(?![a-z])|\||:")
_LETTER_NAME = r"(?:[A-Za-z]|\\(?:overline|hat|tilde) ?\{ ?[A-Za-z] ?\}|\\[a-z]+)"
_NAME = _LETTER_NAME + r"(?:_(?:\{[^{}]{1,12}\}|[A-Za-z0-9]))?'{0,3}(?:\( ?[A-Za-z](?:, ?[A-Za-z])* ?\))?"
_ANSWER_NAME = re.compile(
    rf"{_NAME}|[A-Z]{{2,3}}|\\angle ?[A-Z]{{1,3}}|\\text\{{[A-Za-z ]{{1,30}}\}}|\|(?:[A-Za-z]|[A-Z]{{2}})\|"
)
_TUPLE_NAME = re.compile(rf"\( ?{_NAME}(?: ?, ?{_NAME})+ ?\)")
_REFERENCE_NAME = re.compile(
    r"(?:\(-?[0-9]{1,4}\)|[A-Za-z|():' ]|\\(?:frac|angle|triangle|text|overline|cdot)(?![a-z])|[{}*])+"
)
_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|[A-Za-z0-9])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_CHOICE = re.compile(
    r"(?:\\text\{)?(?:\( ?([A-J]) ?\)(?: ?[:.])?|([A-J])[.):]) ?\}?(?! ?(?:[,;]|and |or |$))"
    r"(?!.*(?:(?<![A-Za-z])\( ?[A-J] ?\)|(?<![A-Za-z(])[A-J][.):]))(.*)"  # nor of several, (A)(B)
    r"|(?!(?:not?|nor|neither|except|never)\b)([^A-Z(]{1,80}) \( ?([A-J]) ?\)",
    re.DOTALL,
)
_CHOSEN = re.compile(r"\A(?i:the )?(?i:option|choice|answer|选项|故选|选|答案)(?: is\b)?[: ]*(?=\(?[A-J]\b)")
_LETTER = re.compile(r"\( ?([A-Ja-j]) ?\)|([A-Z])\)?")
_CAPITALS = re.compile(r"[A-Z]{2,}")
_UNIT = re.compile(r"(?<=[0-9A-Za-z})]) ?\\text\{[^{}0-9!=]*\}(?: ?\^ ?\{?[23]\}?)?$")
_IF = re.compile(r"\A(?:\\text\{ ?(?:if|for|when|where),? ?\}|if |for |when )")
_LOGIC = re.compile(r"\\(lor|land|cup|cap)(?![a-z])")
_SIGNS = re.compile(r"\\[pm][pm](?![a-z])")
_MAX_SIGNS = 3
_SETS = {r"\mathbb{R}": "reals", r"\emptyset": "empty", r"\{\}": "empty", r"\{ \}": "empty", "R": "reals"}


@lru_cache(maxsize=512)
def read(text: str, *, is_reference: bool = False) -> Item:
    """Parse a text. A reference may name its value by any expression of letters, an answer only by a name."""
    return _Reading(is_reference).whole(canonical(text))


class _Reading:
    def __init__(self, is_reference: bool) -> None:
        self._is_reference = is_reference

    def whole(self, text: str) -> Item:
        inside = re.fullmatch(r"\\text\{([^{}]*)\}", text)
        text = _CHOSEN.sub("", inside.group(1).strip() if inside else text, count=1)
        if text.startswith("{") and _encloses(text):
            text = rf"\{{{text[1:-1]}\}}"  # a set in braces without backslashes
        if parse_number(text) is not None:
            return self.value(text)
        notation = read_notation(text)
        if notation is not None:
            return notation
        choice = _CHOICE.fullmatch(text)
        if choice is not None:
            before, behind, after_letter, before_letter, last = choice.groups()
            return Choice(before or behind or last, (after_letter or before_letter or "").strip())
        return self._groups(text) or self._list(text)

    def _groups(self, text: str) -> Items | None:
        groups = split_top(text, _SEMICOLON)[0]
        if len(groups) == 1 or not all("," in group for group in groups):
            return None
        found = [self.whole(group.strip()) for group in groups]
        if not all(isinstance(each, Items) and all(isinstance(one, Named) for one in each.items) for each in found):
            return None
        return Items("list", tuple(Items("group", each.items) for each in found if isinstance(each, Items)))

    def _list(self, text: str) -> Item:
        if all(_ORDER.search(part) for part in split_top(text, _LOGIC)[0]):  # x < 1 \lor x > 2
            text = _LOGIC.sub(lambda match: rf"\text{{ {'or' if match.group(1) in ('lor', 'cup') else 'and'} }}", text)
        parts, separators = split_top(text, _LIST)
        if len(parts) == 1:
            return self.part(text)
        if any(map(is_prose, parts)):
            return Text(key(text))
        items: list[Item] = []
        for part in (part.strip() for part in parts):
            if part:
                read_part = self.part(part)
                items += read_part.items if isinstance(read_part, Items) and read_part.kind == "list" else [read_part]
        if len(items) == 1:
            return items[0]
        words = {word for separator in separators for word in ("and", "or") if word in separator}
        return Items("list", tuple(items), "or" if "or" in words else "and" if words else "")

    def part(self, text: str) -> Item:
        text = text.strip()
        sides, operators = split_top(text, _ORDER)
        signs = [operator.removeprefix("\\") for operator in operators]
        if not signs:
            return self.set_of(text)
        sides = [side.strip() for side in sides]
        if not all(sides):
            return Text(key(text))
        if signs[-1] == "approx":
            return self._rounded(text, sides, signs)
        if "in" in signs or "approx" in signs:
            is_simple = signs == ["in"] and self._is_name(sides[0]) and _is_set(sides[1])
            return Named(key(sides[0]), self.set_of(sides[1])) if is_simple else Text(key(text))
        if signs == ["="] and self._is_name(sides[0]):
            item = self.set_of(sides[1])
            if isinstance(item, Items) and item.kind == "list":
                return Items("list", tuple(Named(key(sides[0]), each) for each in item.items))
            return Named(key(sides[0]), item)
        return Relation(tuple(signs), tuple(self.set_of(side) for side in sides))

    def set_of(self, text: str) -> Item:
        text = text.strip()
        notation = read_notation(text)
        if notation is not None:
            return notation
        ratio = split_top(text, _COLON)[0]
        if len(ratio) > 2 and all(part.strip() for part in ratio):
            return Items("ratio", tuple(self.value(part.strip()) for part in ratio))
        parts, operators = split_top(text, _SET_SIGN)
        if operators and all(part.strip() for part in parts):
            item = self.bracketed(parts[0].strip())
            for operator, part in zip(operators, parts[1:], strict=True):
                sign = {"\\cup": "|", "\\cap": "&", "\\setminus": "-"}[operator]
                item = Combined(sign, item, self.bracketed(part.strip()))
            return item
        return self.bracketed(text)

    def bracketed(self, text: str) -> Item:
        if text.replace(" ", "") in _SETS and (text != "R" or self._is_reference):
            return Known(_SETS[text.replace(" ", "")])
        if text.startswith("\\matrix{") and text.endswith("}") and _encloses(text[7:]):
            return self._grid(text[8:-1])
        if text.startswith("\\cases{") and text.endswith("}") and _encloses(text[6:]):
            return self._cases(text[7:-1])
        opening, closing = ("\\{", "\\}") if text.startswith("\\{") else (text[:1], text[-1:])
        if not (text.endswith(closing) and opening in ("(", "[", "\\{") and closing in (")", "]", "\\}")):
            return self.value(text)
        if len(text) < len(opening) + len(closing) or not _encloses(text.replace("\\{", "{").replace("\\}", "}")):
            return self.value(text)
        inside = text[len(opening) : len(text) - len(closing)].strip()
        return self._set(inside) if opening == "\\{" else self._span(text, inside, opening, closing)

    def value(self, text: str) -> Item:
        letter = _LETTER.fullmatch(text)
        if letter is not None:
            return Text(letter.group(1) or letter.group(2))
        if _CAPITALS.fullmatch(text):
            return Text(text)
        if _SIGNS.search(text):
            return self._both_signs(text)
        if _WORDS.fullmatch(text) and max(map(len, re.split(r"[ '-]", text))) >= 3:
            return Text(key(text))
        quantity = parse_quantity(separate_unit(text))
        if quantity is not None:
            return Value(number(quantity.value), text, quantity.is_percent)
        unit = _UNIT.search(text)
        if text.count("%") > 1 or (unit is not None and scale_words(unit.group())):
            return Text(key(text))
        plain = without_degrees(_UNIT.sub("", text.replace("\\%", "").replace("%", ""))).strip()
        try:
            return Value(parse_formula(plain), text, "%" in text)
        except FormulaError:
            return Text(key(text))

    def _set(self, inside: str) -> Item:
        parts, bars = split_top(inside, _CONDITION)
        if len(parts) == 2 and bars and (name := parts[0].strip()) and parts[1].strip():
            variable = name.split("\\in")[0].strip()
            condition = self.whole(parts[1].strip())
            is_real = "\\in" not in name or "R" in name.split("\\in")[1]
            if is_real and re.fullmatch(_NAME, variable) and isinstance(condition, Relation):
                return Named("", condition)
            return Text(key(rf"\{{{inside}\}}"))
        return Items("set", self._listed(inside))

    def _listed(self, inside: str) -> tuple[Item, ...]:
        found: list[Item] = []
        for part in split_top(inside, _LIST)[0]:
            if part.strip():
                item = self.part(part)
                found += item.items if isinstance(item, Items) and item.kind == "list" else [item]
        return tuple(found)

    def _span(self, text: str, inside: str, opening: str, closing: str) -> Item:
        kind = "tuple" if (opening, closing) == ("(", ")") else "vector"
        parts = split_top(inside, re.compile("[,;]"))[0]
        if len(parts) == 1:
            return (
                self.part(inside)
                if kind == "tuple"
                else (Items("vector", (self.part(inside),)) if closing == "]" and opening == "[" else self.value(text))
            )
        items = tuple(self.part(part) for part in parts if part.strip())
        pair = Items(kind, items) if opening + closing in ("()", "[]") else None
        ends = [_end(item) for item in items]
        if len(items) != 2 or any(end is False for end in ends):
            return pair or Text(key(text))
        low, high = (None if isinstance(end, bool) else end for end in ends)
        signs = [isinstance(item, Value) and item.text.lstrip().startswith("-") for item in items]
        if (low is None and (not signs[0] or opening == "[")) or (high is None and (signs[1] or closing == "]")):
            return Text(key(text))  # (infinity, 1], and infinity with a bracket
        return Span(low, high, opening == "[", closing == "]", pair)

    def _grid(self, inside: str) -> Item:
        rows = [row for row in inside.split(ROW_END) if row.strip()]
        return Grid(tuple(tuple(self.value(cell.strip()) for cell in row.split("&")) for row in rows))

    def _cases(self, inside: str) -> Item:
        rows = [[cell.strip(" ,;.") for cell in row.split("&")] for row in inside.split(ROW_END) if row.strip()]
        if all(len(row) == 1 for row in rows):
            return Items("list", tuple(self.part(row[0]) for row in rows), "and")
        pairs = [(self.value(row[0]), self.part(_IF.sub("", row[-1]).strip())) for row in rows]
        return Items("set", tuple(Items("tuple", pair) for pair in pairs))

    def _both_signs(self, text: str) -> Item:
        r"""Parse ``2 \pm \sqrt3`` as two values; several signs as all combinations, ``\mp`` as the opposite sign."""
        found = _SIGNS.findall(text)
        if len(found) > _MAX_SIGNS:
            return Text(key(text))
        together = r"\mp" in found
        count = 1 if together else len(found)
        items = []
        for choice in range(1 << count):
            signs = iter(["+-"[(choice >> (0 if together else index)) & 1] for index in range(len(found))])
            pieces = _SIGNS.split(text)
            chosen = [sign if each == r"\pm" else "+-"[sign == "+"] for each, sign in zip(found, signs, strict=True)]
            items.append("".join(map("".join, zip(pieces, [*chosen, ""], strict=True))))
        return Items("list", tuple(self.value(item) for item in items))

    def _rounded(self, text: str, sides: Sequence[str], signs: Sequence[str]) -> Item:
        if signs == ["approx"] and self._is_name(sides[0]):
            return Named(key(sides[0]), self.set_of(sides[1]))
        cut = split_top(text, re.compile(r"\\approx(?![a-z])"))[0]
        return Rounded(self.part(cut[0]), cut[1].strip()) if len(cut) == 2 else Text(key(text))

    def _is_name(self, text: str) -> bool:
        if _ANSWER_NAME.fullmatch(text) or _TUPLE_NAME.fullmatch(text):
            return text not in ("e", "i", "\\pi", "\\infty")
        return self._is_reference and _REFERENCE_NAME.fullmatch(_SUBSCRIPT.sub("", text)) is not None


def _end(item: Item) -> Node | bool | None:
    """Return the end of an interval: a formula, None if infinite, False if invalid."""
    if not isinstance(item, Value):
        return Node("symbol", item.text) if isinstance(item, Text) and _LETTER.fullmatch(item.text) else False
    text = item.text.replace(" ", "").lstrip("+-")
    return None if text == "\\infty" else item.node


def _is_set(text: str) -> bool:
    return text[:1] in "([" or text.startswith(("\\{", "\\mathbb", "\\emptyset", "{"))


def split_top(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split ``text`` at matches of ``pattern`` outside of brackets; return the parts and the matches."""
    parts, found, depth, start, index = [], [], 0, 0, 0
    while index < len(text):
        match = pattern.match(text, index) if depth == 0 else None
        if match is not None and match.end() > index:
            parts.append(text[start:index])
            found.append(match.group())
            start = index = match.end()
            continue
        if (character := text[index]) == "\\" and text[index + 1 : index + 2] not in "{}":
            index += 2
            continue
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        index += 1
    return [*parts, text[start:]], found


def _encloses(text: str) -> bool:
    """Return True if the bracket at the start closes at the end."""
    return closing_bracket(text, 0) == len(text) - 1


def is_prose(part: str) -> bool:
    """Return True if a part of a list has many words."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", part))) > 6


def key(text: str) -> str:
    """Return a text for comparison: words case-folded, formulas without blanks."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    is_prose = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", text)) is not None
    text = re.sub(r"\{([A-Za-z0-9+*-])\}", r"\1", text).replace("\\mid", "|")
    return re.sub(r"[\s.]+", "", text.casefold() if is_prose else text)
