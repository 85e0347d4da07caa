r"""Canonical spelling of equivalent notations: ``−``, ``\dfrac``, ``\left(``, ``\mathrm{e}``, ``≤``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "＝": "=", "＜": "<", "＞": ">", "％": "%",
        "，": ",", "、": ",", "；": ";", "：": ":", "（": "(", "）": ")", "［": "[", "］": "]", "｛": "{", "｝": "}",
        "｜": "|", "／": "/", "．": ".", "。": ".", "！": "!", "？": "?", "＊": "*", "＾": "^", "＿": "_", "＄": "$",
        "￥": "¥", "〈": "(", "〉": ")", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ", "\u200b": "",
        "\ufeff": "", "′": "'", "’": "'", "‘": "'", "∶": ":", "∕": "/", "⁄": "/", "º": "°",
    }
)  # fmt: skip
_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "≤": r"\le ", "⩽": r"\le ",
        "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "∈": r"\in ",
        "∉": r"\notin ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ", "…": r"\ldots ",
        "⋯": r"\ldots ", "∑": r"\sum ", "∫": r"\int ", "∏": r"\prod ", "∂": r"\partial ", "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∧": r"\land ",
        "∨": r"\lor ", "¬": r"\neg ", "→": r"\to ", "⇒": r"\Rightarrow ", "⊂": r"\subset ", "⊆": r"\subseteq ",
        "∖": r"\setminus ", "°": r"^\circ ", "∠": r"\angle ", "△": r"\triangle ", "α": r"\alpha ", "β": r"\beta ",
        "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ",
        "≡": r"\equiv ",
    }
)  # fmt: skip
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))
_ROOT = re.compile(r"√ ?(?:\(([^()]{1,200})\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_PART = r"((?:[^{}]|\{[^{}]{0,40}\}){1,40}?)"
_ABOVE_BELOW = re.compile(rf"(?:\{{|\A){_PART} ?\\(over|choose)(?![a-z]) ?{_PART}(?:\}}|\Z)")
_COLOUR = re.compile(r"\\(?:text)?color ?\{[A-Za-z]{1,20}\} ?(?:\{([^{}]{0,200})\})?")
_AREA = re.compile(r"(?<![A-Za-z])([mckd]?m|ft|in|yd|mi|米)([²³])")
_SQUARED = re.compile("[\u3371-\u33df]")  # units in one character: ㎏
_DOTS = re.compile(r"(?<=,)( ?)\.\.\.")
_HAN_AND_OR = re.compile(r"(?<=[0-9A-Za-z)}\]]) ?([和与及且或]) ?(?=[-+0-9A-Za-z(\[\\])")
_RENAMED: Mapping[str, str] = {
    name: other
    for names, other in (
        ("dfrac tfrac cfrac", r"\frac"), ("dbinom tbinom", r"\binom"), ("leq leqslant leqq", r"\le "),
        ("geq geqslant geqq", r"\ge "), ("neq", r"\ne "), ("dots cdots dotsc dotsb vdots", r"\ldots "),
        ("varnothing O", r"\emptyset "), ("simeq sim doteq", r"\approx "), ("times cdot ast", "*"), ("div", "/"),
        ("lbrace", r"\{"), ("rbrace", r"\}"), ("lbrack", "["), ("rbrack", "]"), ("langle lgroup", "("),
        ("rangle rgroup", ")"), ("lvert rvert vert", "|"), ("lt", "<"), ("gt", ">"), ("wedge", r"\land "),
        ("vee", r"\lor "), ("lnot", r"\neg "), ("rightarrow longrightarrow implies", r"\to "), ("prime", "'"),
        ("mid", r"\mid "), ("bar", r"\overline "), ("colon", ":"), ("infin", r"\infty "), ("degree", r"^\circ "),
        ("backslash", r"\setminus "), ("tg", r"\tan "), ("ctg", r"\cot "), ("arctg", r"\arctan "),
        ("left right middle big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr displaystyle", ""),
        ("textstyle scriptstyle limits nolimits rm bf tiny small normalsize large Large LARGE huge Huge", ""),
        ("quad qquad thinspace enspace hfill", " "),
    )
    for name in names.split()
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right) ?\.")
_SPACING = re.compile(r"\\[,;:! ]|~")
_ROW_END = re.compile(r"\\\\(?: ?\[[^\]]{0,10}\])?|\\cr(?![a-z])")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}])")
_STYLE = re.compile(
    r"\\(text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm|pmb|underline)"
    r" ?\{([^{}]*)\}"
)
_ARROWED = re.compile(r"\\(?:vec|overrightarrow|overleftrightarrow) ?\{ ?([A-Za-z]{1,3}) ?\}|\\vec ([A-Za-z])")
_SEGMENT = re.compile(r"\\overline ?\{ ?([A-Z]{2}) ?\}")
_FUNCTION_NAMES = (
    "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot",
    "sec", "csc", "ln", "log", "lg", "sqrt", "exp", "pi", "max", "min", "gcd", "lcm", "abs", "floor", "ceil", "infty",
)  # fmt: skip
_BARE_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({'|'.join(_FUNCTION_NAMES)})(?![A-Za-z])")
_INFINITY = re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])")
_RELATIONS = re.compile(r"<=|=<|=>|>=|!=|<>|==")
_RELATION_OF = {"<=": r"\le ", "=<": r"\le ", ">=": r"\ge ", "=>": r"\to ", "!=": r"\ne ", "<>": r"\ne ", "==": "="}
_ELEMENTS = re.compile(r"\\text\{([A-Z][A-Za-z]{0,3})\}(?= ?_ ?\{? ?[0-9])")  # \text{NH}_3
_NOT = re.compile(r"\\not ?(=|\\in(?![a-z]))")
_MATRIX = re.compile(
    r"[\[(] ?\\begin\{(?:array|matrix|smallmatrix)\} ?(?:\{[clr| ]*\})?(.*?)"
    r"\\end\{(?:array|matrix|smallmatrix)\} ?[\])]"
    r"|\\begin\{[pb](?:small)?matrix\}(.*?)\\end\{[pb](?:small)?matrix\}",
    re.DOTALL,
)
_CASES = re.compile(r"\\begin ?\{[dr]?cases\}(.*?)\\end ?\{[dr]?cases\}", re.DOTALL)
_BLACKBOARD = re.compile(r"\\mathbb ?([RNZQC])(?![A-Za-z])")
# ]0,1[ and [0,1[
_OPEN_ENDED = re.compile(r"(\A|[ ={])([\[\]])([^\[\](),;]{1,60})([,;])([^\[\](),;]{1,60})([\[\]])")
_DERIVATIVE = re.compile(r"\^ ?\{ ?\(([1-4])\) ?\}(?= ?\()")
_CHOSEN_OF = re.compile(r"(?<![A-Za-z\\])C ?_ ?\{? ?([0-9]{1,6}) ?\}? ?\^ ?\{? ?([0-9]{1,6}) ?\}?")
_PRIMES = re.compile(r"\^ ?(?:\{ ?('{1,3}) ?\}|('{1,3}))")
_DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ)(?![a-z]) ?")
_ANGLE = re.compile(r"([0-9.]+|[A-Za-z]|\\[a-z]+) ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))")
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\{,\}|\\,|,\\! ?)[0-9]{3})+(?![0-9])")
_DOLLAR = "¤"
ROW_END = "¶"
"""Row separator of a matrix in canonical spelling."""


def plainly(text: str) -> str:
    """Write an answer in plain characters: one minus sign, one comma, LaTeX for signs; digits stay unchanged."""
    text = _SQUARED.sub(_unpacked, text.translate(_CHARACTERS))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match.group(1) or match.group(2)}}}", text)
    text = _ABOVE_BELOW.sub(_above_below, _DOTS.sub(r"\1\\ldots", _COLOUR.sub(r"\1", text)))
    text = _AREA.sub(lambda match: f"{match.group(1)}^{'23'['²³'.index(match.group(2))]}", text)
    text = _HAN_AND_OR.sub(lambda match: r"\text{ or }" if match.group(1) == "或" else r"\text{ and }", text)
    return _SYMBOL.sub(lambda match: _SYMBOLS[match.group()], text)


def canonical(text: str) -> str:
    """Write a formula in the spelling of the grammar; other text stays unchanged."""
    text = _EMPTY_DELIMITER.sub("", plainly(text)).replace("**", "^").replace("{:}", ":")
    text = text.replace(r"\$", _DOLLAR).replace("$", "").replace(_DOLLAR, "$")
    has_rows = "matrix" in text or "array" in text or "cases" in text
    text = _ROW_END.sub(ROW_END, text) if has_rows else _DOUBLED.sub(r"\\", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    text = _SPACING.sub(" ", text)
    text = _STYLE.sub(_styled, _STYLE.sub(_styled, text))
    text = _ELEMENTS.sub(r"\1", text)
    text = _NOT.sub(lambda match: r"\ne " if match.group(1) == "=" else r"\notin ", text)
    text = _COMMAND.sub(lambda match: _RENAMED.get(match.group(1), match.group()), text)
    text = _ARROWED.sub(lambda match: match.group(1) or match.group(2), text)
    text = _SEGMENT.sub(r"\1", text)
    text = _INFINITY.sub(r"\\infty ", _RELATIONS.sub(lambda match: _RELATION_OF[match.group()], text))
    text = _BARE_FUNCTION.sub(r"\\\1 ", text)
    text = _CHOSEN_OF.sub(r"\\binom{\1}{\2}", _DERIVATIVE.sub(lambda match: "'" * int(match.group(1)), text))
    text = _PRIMES.sub(lambda match: match.group(1) or match.group(2), text)
    if _TRIG.search(text):
        text = _ANGLE.sub(r"(\1*\\frac{\\pi }{180})", text)
    text = _CASES.sub(r"\\cases{\1}", _BLACKBOARD.sub(r"\\mathbb{\1}", _OPEN_ENDED.sub(_round_brackets, text)))
    text = _MATRIX.sub(lambda match: rf"\matrix{{{match.group(1) or match.group(2) or ''}}}", text)
    text = _called(_called(text, r"\sqrt", r"\sqrt"), r"\exp", "e^")
    return re.sub(r"\s+", " ", text).strip()


def without_degrees(text: str) -> str:
    r"""Remove ``^\circ`` from a formula."""
    return _DEGREES.sub(" ", text).strip()


def _unpacked(match: re.Match[str]) -> str:
    return re.sub("([a-z]+)([23])", r"\\text{\1}^\2", unicodedata.normalize("NFKC", match.group()))


def _round_brackets(match: re.Match[str]) -> str:
    before, opening, low, comma, high, closing = match.groups()
    if (opening, closing) == ("[", "]"):
        return match.group()
    return f"{before}{'(' if opening == ']' else '['}{low}{comma}{high}{')' if closing == '[' else ']'}"


def _above_below(match: re.Match[str]) -> str:
    return rf"\{'frac' if match.group(2) == 'over' else 'binom'}{{{match.group(1)}}}{{{match.group(3)}}}"


def _styled(match: re.Match[str]) -> str:
    r"""Remove styles of letters: ``\mathrm{e}`` and ``\text{e}`` are e; words stay text."""
    inside = match.group(2).strip()
    is_letter = len(inside) == 1 and (match.group(1) not in ("text", "mathrm", "mbox") or inside in "eidABCDEFGHIJ")
    if not inside or is_letter or re.fullmatch(r"[-+0-9.,() ]+|\([A-Za-z]\)|\\[A-Za-z]+", inside):
        return f" {inside} " if match.group(2) != inside else inside
    if inside in _FUNCTION_NAMES:
        return rf"\{inside} "
    return rf"\text{{{match.group(2)}}}"


def _called(text: str, name: str, command: str) -> str:
    r"""Write ``\sqrt(x)`` as ``\sqrt{x}``, and ``\exp(x)`` as ``e^{x}``, matching brackets from the right."""
    at = text.rfind(name)
    for _ in range(40):
        if at < 0:
            return text
        start = at + len(name)
        while start < len(text) and text[start] == " ":
            start += 1
        opening = text[start : start + 1]
        end = closing_bracket(text, start) if opening and opening in "({" else -1
        if end >= 0:
            text = f"{text[:at]}{command}{{{text[start + 1 : end]}}}{text[end + 1 :]}"
        elif name != command and opening not in ("", "["):  # \exp x
            text = f"{text[:at]}{command}{text[start:]}"
        at = text.rfind(name, 0, at)
    return text


def closing_bracket(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one at ``start``, whatever its kind; -1 without one."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if depth == 0:
            return index
    return -1
