"""What the text of two answers decides, without SymPy and without a worker process.

A parser of mathematics drops units and bases, and reads clocks as ratios and words as products: they are compared as
they are written.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from verl_ext.rewards.plain import closing, key, number, same_number

_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-4])\s*:\s*(?P<minute>[0-5]\d)(?:\s*:\s*(?P<second>[0-5]\d))?\s*"
    r"(?:\\text\s*\{)?\s*(?P<half>[aApP]\.?\s?[mM]\.?)?\s*\}?"
)
_BASE = re.compile(r"(?:\\text\s*\{)?\(?(?P<digits>[0-9][0-9A-Fa-f]*|[0-9A-Fa-f]+(?=[)}]*_\{?16))[)}]*\s*_\s*\{?\s*"
                   r"(?:\\text\s*\{\s*)?(?P<base>\w+)\s*\}*")  # fmt: skip
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
_TEXT_UNIT = re.compile(r"(?P<body>.*?[\w}).!])\s*(?P<unit>(?:[/ ]*(?:\\cdot)?\s*\\text\s*\{[^{}]*\}"
                        r"(?:\s*\^\s*\{?-?\d\}?)?){1,4})")  # fmt: skip
_BARE_UNIT = re.compile(r"(?P<body>.*?(?:[\d}).!]|\\pi))(?P<gap>\s*)(?P<unit>[a-zA-Z][a-zA-Z ]*(?:\^\s*\{?\d\}?)?"
                        r"(?:\s*/\s*[a-zA-Z]+(?:\^\s*\{?\d\}?)?)?)")  # fmt: skip
# Words that change the number before them, or add another.
_NO_UNIT = re.compile(
    r"\b(?:and|or|if|where|mod|not|hundred|thousand|million|billion|trillion|dozens?|half|halves|thirds?|quarters?|fourths?|"
    r"fifths?|tenths?|squared|cubed|factorial|plus|minus|times|over|divided|base|binary|octal|hex|hexadecimal|less|more|"
    r"fewer|greater|than|to|root|power|choose)\b",
    re.IGNORECASE,
)
_NAMES = {
    "m": "metre meter", "cm": "centimetre centimeter", "mm": "millimetre millimeter", "km": "kilometre kilometer",
    "g": "gram gm", "kg": "kilogram", "mg": "milligram", "s": "second sec", "min": "minute", "h": "hour hr",
    "l": "liter litre", "ml": "milliliter millilitre", "ft": "foot feet", "in": "inch inches", "mi": "mile",
    "yd": "yard", "lb": "pound", "day": "day", "year": "year yr", "dollar": "dollar usd", "cent": "cent",
    "degree": "deg degree", "mph": "mph", "unit": "unit", "n": "newton", "j": "joule", "w": "watt", "v": "volt",
    "k": "kelvin", "hz": "hertz", "pa": "pascal", "mol": "mole", "sq": "square", "cubic": "cubic cu",
}  # fmt: skip
_UNITS = {word: name for name, words in _NAMES.items() for word in (name, *words.split())}
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_WORD = re.compile(
    r"(?:\\text\s*\{\s*\(?\s*(?P<marked>[^{}\\$()]*[a-zA-Z][^{}\\$()]*?)\)?\s*\}|"
    r"\(?(?P<bare>[a-zA-Z ]+)\)?)\.?"
)


@lru_cache(maxsize=4096)
def split_unit(text: str) -> tuple[str, str | None]:
    """The text without its unit, and the unit by its short name; None where there is none."""
    if text.startswith(("\\$", "$", "€", "£", "¥")):
        sign = text.lstrip("\\")[0]
        return text.lstrip("\\")[1:].strip(), "dollar" if sign == "$" else sign
    if text.endswith("%"):
        return text[:-1].rstrip(), "%"
    if text.endswith("^\\circ") and not _FUNCTION.search(text):
        return text[: -len("^\\circ")].rstrip(), "degree"
    if (match := _TEXT_UNIT.fullmatch(text)) and not _NO_UNIT.search(match["unit"]):
        words = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", match["unit"].replace("\\cdot", " "))
        unit = _unit(words)
        return (match["body"].removesuffix("^\\circ").rstrip(), unit) if unit else (text, None)
    if match := _BARE_UNIT.fullmatch(text):
        words = re.findall("[a-zA-Z]+", match["unit"])
        known = all(word.lower() in _UNITS or _singular(word.lower()) in _UNITS for word in words)
        spoken = bool(match["gap"]) and all(len(word) > 2 for word in words)
        # `5m` is a product of a letter, and so is `5 k`; `5 m` and `5cm` are lengths.
        short = len(match["unit"]) == 1 and (
            not match["gap"] or match["unit"] not in "mghlsL" or not match["body"][-1].isdigit()
        )
        if (known and not short or spoken) and not _NO_UNIT.search(match["unit"]):
            return match["body"].rstrip(), _unit(match["unit"])
    return text, None


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def _unit(words: str) -> str:
    """The short name of a unit."""
    power = {"sq": "^2", "cubic": "^3"}
    parts = [_UNITS.get(word) or _UNITS.get(_singular(word)) or _singular(word)
             for word in re.findall(r"[a-z]+|\^|-?\d+|/|[^\sa-z{}.]", words.lower().replace(" per ", "/"))]  # fmt: skip
    if parts and parts[0] in power:
        parts = [*parts[1:2], power[parts[0]], *parts[2:]]
    return "".join(parts)


def decide(true: str, given: str) -> bool | tuple[str, str]:
    """Whether two tidy answers are the same, where their text alone says so; else both without their units."""
    if key(true) == key(given):
        return True
    numbers = number(true), number(given)
    if None not in numbers:
        return same_number(*numbers)
    for written in (_clocks, _bases, _words):
        if (verdict := written(true, given)) is not None:
            return verdict
    (true_body, true_unit), (given_body, given_unit) = split_unit(true), split_unit(given)
    if "%" in (true_unit, given_unit):
        return _percent(true_body, true_unit, given_body, given_unit)
    if true_unit and given_unit and true_unit != given_unit:
        return False
    if "degree" in (true_unit, given_unit) and "\\pi" in true_body + given_body:
        return true, given
    if (true_body, given_body) != (true, given):
        return decide(true_body, given_body)
    if {_brackets(true), _brackets(given)} == {"{", "("}:
        return False
    return true, given


def _clocks(true: str, given: str) -> bool | None:
    """Times of day are compared as such: as ratios, 3:30 is 4:40."""
    clocks = [_CLOCK.fullmatch(text) for text in (true, given)]
    if clocks[0] is None:
        return None
    if clocks[1] is None:
        return False if ":" not in given or not re.fullmatch(r"[\d: ]+", given) else _ratios(true, given)
    (hour, *rest, half), (other, *others, other_half) = (
        (int(clock["hour"]), int(clock["minute"]), int(clock["second"] or 0), (clock["half"] or "")[:1].lower())
        for clock in clocks
    )
    if rest != others:
        return False
    if half and other_half:
        return half == other_half and hour % 12 == other % 12
    if half or other_half:
        # 14:30 is 2:30 pm; 2:30 leaves it open.
        known, open_hour = ((hour, half), other) if half else ((other, other_half), hour)
        return open_hour in (known[0], known[0] % 12 + 12 * (known[1] == "p"))
    return hour == other


def _ratios(true: str, given: str) -> bool | None:
    """Ratios of numbers are equal term by term, up to a common factor."""
    terms = [[number(term) for term in text.split(":")] for text in (true, given)]
    if len(terms[0]) != len(terms[1]) or any(None in side for side in terms):
        return None
    ours, theirs = ([term.value for term in side] for side in terms)
    return any(ours) == any(theirs) and all(
        a * d == b * c for a, b in zip(ours, theirs, strict=True) for c, d in zip(ours, theirs, strict=True)
    )


def _bases(true: str, given: str) -> bool | None:
    """Numerals of a base are compared with their base."""
    found = [_BASE.fullmatch(text) for text in (true, given)]
    if found == [None, None]:
        return _ratios(true, given) if ":" in true and ":" in given else None
    if None in found:
        return False
    ours, theirs = ((match["digits"].lstrip("0").upper(), _BASES.get(match["base"], match["base"])) for match in found)
    return ours == theirs


def _words(true: str, given: str) -> bool | None:
    """Words are compared letter by letter: as a product of letters, `no` is `on`."""
    words, marked = [], False
    for text in (true, given):
        match = _WORD.fullmatch(text)
        if match is None:
            return None
        marked |= match["marked"] is not None
        words.append(" ".join((match["marked"] or match["bare"]).lower().rstrip(". ").split()))
    if words[0] == words[1]:
        return True
    names = len(true) > 1 and true.isalpha() and true.isupper()
    spoken = any(set(word) & set("aeiou" if len(word) > 2 else "eiou") for word in words if len(word) > 1)
    spoken = spoken or marked or names
    return False if spoken else None


def _percent(true: str, true_unit: str | None, given: str, given_unit: str | None) -> bool | tuple[str, str]:
    """50% is 50% or 0.5; and 50, where the question asks for a percentage, but 0.5% is not 0.5."""
    if true_unit == given_unit:
        return decide(true, given)
    if (true_unit or "%", given_unit or "%") != ("%", "%"):
        return False
    ours, theirs = number(true), number(given)
    if ours is None or theirs is None:
        return decide(true, given)
    if same_number(ours, theirs):
        return abs(ours.value) > 1
    hundredth = Fraction(1, 100)
    if true_unit:
        ours = ours._replace(value=ours.value * hundredth)
    else:
        theirs = theirs._replace(value=theirs.value * hundredth)
    return same_number(ours, theirs)


def _brackets(text: str) -> str | None:
    """The kind of bracket around the whole of a list: `{` or `(`."""
    if text.startswith("\\{") and text.endswith("\\}") and text.find("\\}") == len(text) - 2:
        return "{"
    if text.startswith("(") and "," in text and closing(text, 0) == len(text) - 1:
        return "("
    return None
