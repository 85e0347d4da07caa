r"""Units after a number: which may be omitted (``18 dollars``, ``5\text{ cm}^2``, ``90^\circ``) and which not.

Words that change the value are not units. ``percent`` becomes a percent sign. ``million``, ``dozen`` and similar words
multiply, so ``5 million`` is 5000000. ``half`` and ``third`` stay words. Units of one kind are compared: ``5 km`` is
not ``5 m``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

_SPACE = r"(?:[ ~]|\\[ ,;:!]){0,4}"
_STYLED = (
    r"(?:\\mu ?)?\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|mathrm|mbox|hbox|operatorname)"
    r" ?\{(?! ?[abcefijknopqruvwxyz] ?\})(?:[^{}%0-9!=]|\^ ?-?[0-9]|\^?\{[^{}%!=]{0,10}\}){1,60}\}"
)
_DEGREE = r"(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|°|\\degree)"
_SIGN = rf"{_DEGREE}(?: ?[CF](?![a-z]))?|[€£¥₹₩₽¢℃℉Ω]|\\?\$|\\(?:Omega|ohm)(?![a-z])"
_EXPONENT = r"(?: ?\^ ?(?:-?[0-9]|\{ ?-?[0-9] ?\}))?"
_HAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_UNIT = re.compile(
    rf"{_SPACE}(?:(?:{_STYLED}|{_SIGN}){_EXPONENT}"
    rf"(?:{_SPACE}(?:(?:/|\\cdot(?![a-z])|\\times(?![a-z])|\*){_SPACE})?(?:{_STYLED}|{_SIGN}){_EXPONENT}){{0,4}}"
    rf"|(?<=[ ~,])(?:(?:[A-Za-z]{{2}}|[A-Za-z]/)[A-Za-z ,/]{{0,60}}){_EXPONENT}|(?P<han>[{_HAN}][{_HAN}/]{{0,7}}))"
)
_NUMBER_END = re.compile(r"[0-9}](?![0-9.,/}])")
_PERCENT_NAMES = r"(?:percent(?:age)?|per cent|pct\.?)(?! points?)"
_PERCENT_WORDS = re.compile(
    rf"{_SPACE}(?:\\text\{{ ?{_PERCENT_NAMES} ?\}}|\$? ?(?<=[ $]){_PERCENT_NAMES}(?![A-Za-z]))|(?<=[0-9])\$ ?\\?%"
)
_WORD = re.compile(r"[A-Za-z]+")
_ONE_OF = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MULTIPLES = _ONE_OF | {f"{word}s": size for word, size in _ONE_OF.items()}
_SCALES = frozenset((*_MULTIPLES, "score", "scores", "half", "halves", "third", "thirds", "fifths"))
_NO_UNIT = re.compile(
    r"\b(?:and|or|nor|but|to|not|no|than|more|less|least|most|fewer|point|minus|plus|times|over|by|squared|cubed|mod"
    r"|divided|if|unless|except|wrong|incorrect|false)\b"
)
# Units of one kind per line; ``cm centimeter centimetre`` is one unit.
_KINDS = (
    "mm millimeter millimetre 毫米, cm centimeter centimetre 厘米, dm decimeter decimetre 分米, m meter metre 米,"
    " km kilometer kilometre 千米 公里, inch inches 英寸, ft foot feet 英尺, yd yard, mi mile 英里",
    "ms millisecond 毫秒, s sec second 秒 秒钟 초, min minute 分钟 분, h hr hour 小时 時間 시간 时, day 天 日 일,"
    " week 周 星期, month 月 个月, yr year 年 년, decade, century centuries 世纪",
    "mg milligram 毫克, g gram 克, kg kilogram 千克 公斤, t ton tonne 吨, oz ounce, lb pound 磅",
    "ml milliliter millilitre 毫升, cl centiliter centilitre, l liter litre 升, gallon, quart, pint, cup",
    "¢ cent penny pennies, $ dollar usd 美元, € euro eur 欧元, £ gbp 英镑, ¥ yen jpy 円 日元,"
    " 元 cny rmb yuan 人民币 块钱,"
    " 角, ₹ rupee inr, ₩ won 원, ₽ ruble",
    "am midnight, pm noon",
    "ad ce, bc bce",
    "north, south, east, west, northeast, northwest, southeast, southwest",
    "increase gain profit rise, decrease loss drop fall",
    "clockwise, counterclockwise anticlockwise",
    "平方厘米, 平方米, 平方千米 平方公里, 平方分米, 公顷, 亩",
    "立方厘米, 立方米, 立方分米",
    "j joule, kj kilojoule, cal calorie, kcal kilocalorie, ev, kwh",
    "w watt, kw kilowatt, mw megawatt, milliwatt, hp horsepower",
    "n newton, kn kilonewton",
    "v volt, kv kilovolt, mv millivolt",
    "a amp ampere, ma milliampere",
    "hz hertz, khz kilohertz, mhz megahertz, ghz gigahertz",
    "pa pascal, kpa kilopascal, mpa megapascal, atm, bar",
    "bit, byte, kb kilobyte, mb megabyte, gb gigabyte, tb terabyte",
    "°c celsius, °f fahrenheit, k kelvin",
    "° degree, radian rad",
)
_UNITS: Mapping[str, tuple[int, str]] = {
    form: (kind, names.split()[0])
    for kind, line in enumerate(_KINDS)
    for names in line.split(", ")
    for word in names.split()
    for form in (word, f"{word}s" if len(word) > 1 else word)
}
# Chinese, Japanese and Korean counters, and words that multiply.
_COUNTERS = frozenset(
    "个人名位只头条匹棵株朵本册页张支枝把台辆架艘间座层栋件套双对种类次回遍步块片颗粒根瓶杯碗盒箱袋包组队班题道岁度倍票户家所面"
    "排行列段点份部門冊個枚개명권살번장인分时"
) | {"平方", "立方", "单位", "마리", "자루", "송이"}
_HAN_MULTIPLES = {"万": 10**4, "萬": 10**4, "만": 10**4, "亿": 10**8, "億": 10**8, "억": 10**8, "百": 100, "千": 1000}
_MAX_TAIL = 120  # maximum length of the units at the end
_CLOSE = re.compile(rf"(.*[0-9])(([A-Za-z]{{2,20}})(?:/[A-Za-z]{{1,12}})?{_EXPONENT})")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)|[{}^~]")
_UNIT_WORDS = re.compile(rf"(°[cf]?|[a-z]+|[€£¥₹₩₽¢$]|[{_HAN}]+)(?:\^(-?[0-9]))?")
_SQUARE = re.compile(r"\b(square|sq\.?|cubic) ([a-z]+)")
_DEGREES = re.compile(_DEGREE)
_TEMPERATURE = re.compile(r"(?:° ?|degrees? )([cf])(?:elsius|ahrenheit)?(?![a-z])")
_MILLIWATT = re.compile(r"(?<![A-Za-z])mW(?![A-Za-z])")
_HALF_OF_DAY = re.compile(r"\b([ap])\. ?m\b\.?|\b([ap]) m\b")
_INCH = re.compile(r"\{ ?in\.? ?\}|(?<=/)in\b|\bin(?= ?\^)")
_POWER = re.compile(r"\^ ?\{[^{}]*\}")
_TAIL = re.compile(rf"{_SPACE}(?:(?:{_STYLED}|\\?\$|\\cdot|[A-Za-z€£¥₹₩₽¢°/ {_HAN}]){_EXPONENT}){{1,60}}$")
_PREFIX = re.compile(r"[-+]? ?(?:[A-Z]{0,3}\\?(\$)|([€£¥₹₩₽])|(USD|EUR|GBP|JPY|INR) )")


def with_percent_sign(text: str) -> str:
    r"""Write ``50 percent`` and ``50\text{ percent}`` as ``50\%``."""
    return _PERCENT_WORDS.sub(lambda _: r"\%", text)


def scale_words(text: str) -> list[str]:
    """Return the words in ``text`` that multiply a number, sorted."""
    return sorted(word for word in map(str.lower, _WORD.findall(text)) if word in _SCALES)


def same_magnitude(answer: str, reference: str) -> bool:
    """Return True unless units of one kind differ in magnitude, as ``5 km`` and ``5 m`` do.

    A unit that one side lacks, or that is unknown, is not compared.
    """
    given, expected = _units_of(answer), _units_of(reference)
    if not given or not expected:
        return True
    if len(given) != len(expected):
        return False
    return all(
        one[0] != other[0] or (one[1] == other[1] and (one[2] == other[2] or not (one[2] and other[2])))
        for one, other in zip(given, expected, strict=True)
    )


def _units_of(text: str) -> list[tuple[int, str, str]]:
    r"""Return the units after a number, or the currency before it, as (kind, name, exponent), in text order.

    A single letter counts in ``\\text{}``, in ``km/h`` and after a plain number; elsewhere it is a variable.
    """
    written = _DEGREES.sub("°", text)
    tail, prefix = _TAIL.search(written[-_MAX_TAIL:]), _PREFIX.match(written)
    words: list[tuple[str, str]] = []
    if tail:
        spelled = _INCH.sub("{inch}", _MILLIWATT.sub("milliwatt", tail.group()))
        plain = re.sub(r"\\[A-Za-z]+", " ", spelled).lower()
        plain = _TEMPERATURE.sub(r"°\1", re.sub(r"[{}]|\\.", "", plain).replace(" ^", "^").replace("^ ", "^"))
        plain = _HALF_OF_DAY.sub(lambda match: f"{match.group(1) or match.group(2)}m", plain)
        plain = _SQUARE.sub(lambda match: f"{match.group(2)}^{'3' if match.group(1) == 'cubic' else '2'}", plain)
        words = _UNIT_WORDS.findall(plain)
    is_unit = tail is not None and (
        "{" in _POWER.sub("", tail.group())
        or "/" in tail.group()
        or parse_number(written[: -len(tail.group())]) is not None
    )
    found = [
        (*_UNITS[word], exponent)
        for word, exponent in words
        if word in _UNITS and (is_unit or not re.fullmatch("[a-z]", word))
    ]
    if not found and prefix is not None:
        return [(*_UNITS[next(group for group in prefix.groups() if group).lower()], "")]
    return found


def separate_unit(text: str) -> str:
    """Write ``5cm`` as ``5 cm``, if the unit is known."""
    close = _CLOSE.fullmatch(text)
    return f"{close[1]} {close[2]}" if close is not None and close[3].lower() in _UNITS else text


def parse_quantity(text: str) -> PlainNumber | None:
    r"""Parse a plain number with or without a unit; None for anything else. ``18 dollars`` is 18.

    A unit is one or more words of at least two letters after a blank, a short text in ``\text{}``, a degree sign, or a
    trailing currency sign; words that multiply precede it.
    """
    number = parse_number(text)
    if number is not None:
        return number
    for end in _NUMBER_END.finditer(text):
        unit = _UNIT.fullmatch(text, end.end())
        if unit is not None:
            if unit["han"]:
                return _in_han(text[: end.end()], unit["han"])
            return _in_units(text[: end.end()], _COMMAND.sub(" ", unit.group()).lower())
    return None


def _in_units(written: str, unit: str) -> PlainNumber | None:
    number, words = parse_number(written), _WORD.findall(unit)
    if number is None or _NO_UNIT.search(unit) or (number.is_percent and _SCALES & set(words)):
        return None
    while words and words[0] in _MULTIPLES:
        number = replace(number, value=number.value * _MULTIPLES[words.pop(0)])
    return None if _SCALES & set(words) else number


def _in_han(written: str, unit: str) -> PlainNumber | None:
    number = parse_number(written)
    while number is not None and unit and unit.split("/")[0] not in _UNITS and unit[0] in _HAN_MULTIPLES:
        number, unit = replace(number, value=number.value * _HAN_MULTIPLES[unit[0]]), unit[1:]
    words = unit.split("/")
    return number if all(not word or word in _UNITS or word in _COUNTERS for word in words) else None


_DIGITS = r"[0-9]{1,200}"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]{{0,200}})?|\.{_DIGITS})"
_PLAIN = re.compile(rf"([-+]?){_DECIMAL}(?:[eE][-+]?[0-9]{{1,2}})?")
_SLASH = re.compile(rf"([-+]?) ?({_DECIMAL}) ?/ ?([-+]?{_DECIMAL})")
_FRAC = re.compile(rf"([-+]?) ?\\[cdt]?frac ?\{{ ?([-+]?{_DECIMAL}) ?\}} ?\{{ ?([-+]?{_DECIMAL}) ?\}}")
_SHORT_FRAC = re.compile(r"([-+]?) ?\\[dt]?frac ?([0-9]) ?([0-9])")
_MIXED = re.compile(
    rf"([-+]?) ?({_DIGITS}) ?(?:(?<= )({_DIGITS})/({_DIGITS})|\\[dt]?frac ?\{{({_DIGITS})\}} ?\{{({_DIGITS})\}}"
    r"|\\[dt]?frac ?([0-9]) ?([0-9]))"
)
_SCIENTIFIC = re.compile(
    rf"([-+]?{_DECIMAL}) ?(?:\\times|\\cdot|×|\*) ?10 ?(?:\^|\*\*) ?"
    r"(?:\{ ?([-+]?[0-9]{1,2}) ?\}|([-+]?[0-9]{1,2}))"
)
_TEN = re.compile(r"([-+]?) ?10 ?(?:\^|\*\*) ?(?:\{ ?([-+]?[0-9]{1,2}) ?\}|([-+]?[0-9]{1,2}))")
_REPEATING = re.compile(
    r"([-+]?)([0-9]{0,200})\.([0-9]{0,200})"
    r"(?:\\(?:overline|bar) ?\{([0-9]{1,200})\}|(\\dot ?\{?[0-9]\}?(?:[0-9]{0,40}\\dot ?\{?[0-9]\}?)?))"
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,\\! ?|,|\{,\}|\\,)[0-9]{3}){1,60}(?![0-9,])")
_SEPARATOR = re.compile(r"\{,\}|\\,|,\\! ?|,")
_PERCENT = re.compile(r" ?\\?%$")
# US$18, $18, ¥3, EUR 5, Rs. 40
_CURRENCY = re.compile(
    r"^([-+]?) ?(?:(?:US|USD|CA|C|AU|A|NZ|HK|S|R)?\\?\$|[€£¥₹₩₽]|(?:USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD)(?= )|Rs\.?) ?"
    r"(?=[0-9.])"
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """Number with its percent sign: ``50%`` is ``value=50, is_percent=True``.

    Two plain numbers are equal if value *and* percent sign are: 50% is neither 0.5 nor 50. ``is_evaluated`` is False
    for an open division (``6/2``, ``2/4``), and is ignored by equality.
    """

    value: Fraction
    is_percent: bool
    is_evaluated: bool = field(compare=False)


def parse_number(text: str) -> PlainNumber | None:
    r"""Parse a plain number exactly; None for anything else, also for a fraction over zero.

    Accepted: ``-3``, ``1,234.50``, ``1{,}234``, ``.5``, ``1e3``, ``2 \times 10^3``, ``10^3``, ``3/4``, ``\frac{3}{4}``,
    ``\frac34``, ``50%``, ``$18``, ``US$18``, the mixed numbers ``1 1/2`` and ``1\frac{1}{2}``, and repeating decimals,
    ``0.1\overline{6}``.

    An exponent has at most 2 ASCII digits and a number at most 200, which bounds the time.
    """
    written = text.strip().replace("−", "-")
    percent = _PERCENT.search(written)
    written = _PERCENT.sub("", written) if percent else _CURRENCY.sub(r"\1", written)
    return _read(_GROUPED.sub(lambda match: _SEPARATOR.sub("", match.group()), written), percent is not None)


def _read(text: str, is_percent: bool) -> PlainNumber | None:
    if _PLAIN.fullmatch(text):
        return PlainNumber(Fraction(text), is_percent, True)
    for pattern, value_of in _COMPOUND:
        if (match := pattern.fullmatch(text)) and (value := value_of(match)) is not None:
            return PlainNumber(value, is_percent, True)
    match = _SLASH.fullmatch(text) or _FRAC.fullmatch(text) or _SHORT_FRAC.fullmatch(text)
    if match is None:
        return None
    above, below = Fraction(match.group(2)), Fraction(match.group(3))
    if below == 0:
        return None
    whole = above.denominator == below.denominator == 1 and abs(below) > 1
    is_reduced = whole and math.gcd(above.numerator, below.numerator) == 1
    return PlainNumber(_sign(match) * above / below, is_percent, is_reduced)


def _mixed(match: re.Match[str]) -> Fraction | None:
    """Return 3/2 for ``1 1/2``; None if the fraction is not below one (``1 3/2``), which may be two numbers."""
    whole, above, below = (int(group) for group in match.groups()[1:] if group is not None)
    if not 0 < above < below:
        return None
    return _sign(match) * (whole + Fraction(above, below))


def _scientific(match: re.Match[str]) -> Fraction:
    r"""Return 1500 for ``1.5 \times 10^{3}``."""
    return Fraction(match.group(1)) * Fraction(10) ** int(match.group(2) or match.group(3))


def _power_of_ten(match: re.Match[str]) -> Fraction:
    return _sign(match) * Fraction(10) ** int(match.group(2) or match.group(3))


def _repeating(match: re.Match[str]) -> Fraction:
    r"""Return 1/10 + 6/90 = 1/6 for ``0.1\overline{6}``, or ``0.1\dot{6}``."""
    _, whole, fixed, *periods = match.groups()
    period = re.sub("[^0-9]", "", next(filter(None, periods)))
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return _sign(match) * (start + tail)


def _sign(match: re.Match[str]) -> int:
    return -1 if match.group(1) == "-" else 1


_COMPOUND: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction | None]], ...] = (
    (_MIXED, _mixed),
    (_REPEATING, _repeating),
    (_SCIENTIFIC, _scientific),
    (_TEN, _power_of_ten),
)
