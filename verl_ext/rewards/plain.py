"""Answers as text: one writing for each symbol, and plain numbers as exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MOST_EXPONENT = 10_000
"""Largest power of ten that is written out."""

_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "°": r"^\circ ",
    "√": r"\sqrt ", "θ": r"\theta ", "，": ",", "：": ":", "′": "'", "²": "^2", "³": "^3", "\u00a0": " ", "\u2009": " ",
}  # fmt: skip
_TABLE = str.maketrans(_UNICODE)
_WORDS = ("arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|theta|alpha|beta|infty|"
          "gcd|lcm|max|min")  # fmt: skip
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|displaystyle|textstyle|[bB]ig+[lr]?)(?![a-zA-Z])\.?", ""),
        (r"(?<!\\)\\(?:[,;:! ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|thinspace(?![a-zA-Z]))|(?<!\\)~", " "),
        (r"\{\s*,\s*\}", ","),
        (r"\\(?:text(?:rm|it|bf|normal|sf|tt)|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?)(?![a-zA-Z])",
         r"\\text"),
        (rf"\\text\s*\{{\s*(e|i|{_WORDS})\s*\}}", r" \1 "),
        (r"\\text\s*\{\s*\}", ""),
        (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\le(?:q|qslant)?(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\ge(?:q|qslant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\l(?:brace)(?![a-zA-Z])", r"\\{"),
        (r"\\r(?:brace)(?![a-zA-Z])", r"\\}"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\degree(?![a-zA-Z])|\^\s*\{?\s*\\circ\s*\}?", r"^\\circ "),
        (r"(?:\\text\s*\{\s*percent\s*\}|\\%|(?<=[\d} ])percent(?![a-zA-Z]))", "%"),
        (r"\*\*", "^"),
        (r"\^\s*\{\s*(?:\\prime\s*)\}|\^\s*\\prime(?![a-zA-Z])", "'"),
        (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,9})(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(^|[(\[,=])\s*\+\s*", r"\1"),
        (r"\s+", " "),
    )
)  # fmt: skip
_TEXT_OR_WORD = re.compile(rf"\\text\s*\{{[^{{}}]*\}}|(?<![a-zA-Z\\])(?:{_WORDS})(?![a-z])")
_MATH = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\[(\[](.+?)\\[)\]]", re.DOTALL)
_NOT = re.compile(r"(?<!\\)\b(?:not|n't)\b")
_JOINT = re.compile(r"\s*(?:,|;)?\s*(?:and|or)?\s*")
_GROUPED = re.compile(r"(?<![\d.,] )(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d]| \d)")
_LOOSE_SPACE = re.compile(r"(?<=[^a-zA-Z0-9.]) | (?=[^a-zA-Z0-9.])")
_SINGLE = re.compile(r"(?<=[_^])\{(\w)\}")

_D = "[0-9]{1,1000}"
_SIGN = r"(?P<sign>[+-]?)\s*"
_NUMBERS = tuple(
    re.compile(_SIGN + pattern)
    for pattern in (
        rf"(?P<over>{_D})(?:\s?/\s?(?P<under>{_D}))?",
        rf"(?:(?P<whole>{_D})\s?)?\\frac\s*(?:\{{\s*(?P<over>-?{_D})\s*\}}|(?P<over1>\d))\s*"
        rf"(?:\{{\s*(?P<under>{_D})\s*\}}|(?P<under1>\d))",
        rf"(?P<whole>{_D}) (?P<over>{_D})/(?P<under>{_D})",
        rf"(?P<over>[0-9]{{1,3}}(?:,[0-9]{{3}}){{1,300}}(?:\.{_D})?)",
        rf"(?P<over>(?:{_D})?\.{_D}|{_D}\.)",
        rf"(?P<over>{_D}(?:\.{_D})?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*(?P<ten>[+-]?\d{{1,9}})\s*\}}|"
        r"(?P<ten1>[+-]?\d{1,9}))",
        rf"(?P<repeat>(?:{_D})?\.(?:{_D})?)(?:\\overline|\\bar|\\dot)\s*\{{(?P<period>\d{{1,100}})\}}",
        rf"(?P<repeat>(?:{_D})?\.(?:{_D})?)\((?P<period>\d{{1,100}})\)",
    )
)


class Number(NamedTuple):
    """A number as it is written."""

    value: Fraction
    decimal: bool
    """Written with a decimal point, so that it may be a rounded one."""


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    """The text with one writing for each symbol, function, space and power."""
    if not text.isascii():
        text = text.translate(_TABLE)
    if text.isalnum():
        return text
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    text = _TEXT_OR_WORD.sub(lambda match: _command(match.group()), text)
    for opening, before in ((r"\sqrt", r"\sqrt"), ("^", "^")):
        text = _braced(text, opening, before)
    text = _GROUPED.sub(lambda match: match.group().replace(" ", ""), text)
    return text.strip()


def formula(text: str) -> str:
    """The formula in an answer of prose, with a unit behind it; a text without or with several formulas as it is."""
    if not _MATH.search(text):
        return text
    before, *parts = _MATH.split(text)
    formulas, between = [one or other for one, other in zip(parts[::3], parts[1::3], strict=True)], parts[2::3]
    if _NOT.search(text):
        return text
    if not before.strip() and all(_JOINT.fullmatch(part) for part in between[:-1]):
        if len(formulas) > 1 and not between[-1].strip(" ."):
            return "".join(map("".join, zip(formulas, between, strict=True))).strip(" .")
        if len(formulas) == 1 and (rest := between[0].strip(" .")) and len(rest.split()) <= 3 and "\\" not in rest:
            return f"{formulas[0]} \\text{{{rest}}}"
    if len(formulas) == 1 and not re.search(r"\d", before + between[0]):
        return formulas[0]
    return text


def _command(word: str) -> str:
    return word if word.startswith("\\") else f"\\{word} "


def _braced(text: str, opening: str, before: str) -> str:
    """`sqrt(...)` and `^(...)` with braces for their parentheses, also where these are nested."""
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        while text[start : start + 1] == " ":
            start += 1
        end = start
        if text[start : start + 1] == "(" and (end := closing(text, start)) > 0:
            text = f"{text[:at]}{before}{{{text[start + 1 : end]}}}{text[end + 1 :]}"
        at = text.find(opening, at + len(opening))
    return text


def closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`; -1 where none does."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([") - (text[place] in ")]")
        if depth == 0:
            return place
    return -1


def key(text: str) -> str:
    """What two writings of one answer have in common; spaces count between letters and digits only."""
    return _SINGLE.sub(r"\1", _LOOSE_SPACE.sub("", tidy(text)))


@lru_cache(maxsize=4096)
def number(text: str) -> Number | None:
    """The exact value of an integer, fraction, mixed number, decimal or power of ten times one; else None."""
    text = text.strip()
    for pattern in _NUMBERS:
        if match := pattern.fullmatch(text):
            parts = match.groupdict()
            if (period := parts.get("period")) is not None:
                value, decimal = _repeating(parts["repeat"], period), False
            else:
                over = (parts["over"] or parts["over1"]).replace(",", "")
                under = int(parts.get("under") or parts.get("under1") or 1)
                ten = int(parts.get("ten") or parts.get("ten1") or 0)
                if not under or abs(ten) > MOST_EXPONENT:
                    return None
                decimal = "." in over
                value = Fraction(over) / under * Fraction(10) ** ten + int(parts.get("whole") or 0)
            return Number(-value if match["sign"] == "-" else value, decimal)
    return None


def _repeating(before: str, period: str) -> Fraction:
    digits = len(before.partition(".")[2])
    return Fraction("0" + before + "0") + Fraction(int(period), (10 ** len(period) - 1) * 10**digits)


def is_rounding(decimal: Fraction, exact: Fraction) -> bool:
    """Whether a decimal is another number rounded or cut off, with six decimals and six significant digits or more.

    An integer is not rounded, and fewer digits are too easily hit.
    """
    if exact.denominator == 1:
        return False
    places = _places(decimal)
    if places is None or places < 6:
        return False
    given, wanted = decimal * 10**places, exact * 10**places
    return abs(given) >= 10**5 and (abs(given - wanted) <= Fraction(1, 2) or given == int(wanted))


def _places(decimal: Fraction) -> int | None:
    """Decimal places that a finite decimal needs."""
    rest, places = decimal.denominator, [0, 0]
    for at, factor in enumerate((2, 5)):
        while rest % factor == 0:
            rest //= factor
            places[at] += 1
    return max(places) if rest == 1 else None


def same_number(true: Number, given: Number) -> bool:
    """Whether two numbers are equal, or one is a decimal that the other one, which is none, rounds to."""
    if true.value == given.value:
        return True
    if true.decimal == given.decimal:
        return False
    decimal, exact = (true, given) if true.decimal else (given, true)
    return is_rounding(decimal.value, exact.value)
