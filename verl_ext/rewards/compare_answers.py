"""What math-verify reads in two answers, compared exactly.

math-verify compares numbers after rounding (`float_rounding`, `numeric_precision`), and no rounding tells 1/2004! from
1/2006!: numbers and expressions are compared here, from its parse; relations and all else by its `verify`. Runs in the
worker processes only, which bound its time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, is_expr_of_only_symbols
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from verl_ext.rewards.plain import is_rounding, key

MOST_BITS = 1 << 20
"""Largest numerator or denominator that is written out; 50,000! has fewer bits."""
DIGITS = 150
"""Digits up to which two irrational numbers must agree to be equal."""
_POINTS = tuple(sympy.Rational(a, b) for a, b in ((31, 83), (139, 97), (563, 101), (-41, 89), (-257, 103)))
_UNEVALUATED = (sympy.Integral, sympy.Derivative, sympy.Sum, sympy.Product, sympy.Limit, AppliedUndef, sympy.MatrixExpr)
# Units are split off before: stripped by the parser, 5t would be 5.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="last"),
)
# The parser drops primes and degrees, and takes R for r; it keeps indices.
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")
_CAPITALS = re.compile(r"\\(?:text|mathbb|mathcal|mathfrak|begin|end|overline|vec|widehat|hat|bar)\s*\{[^{}]*\}|"
                       r"\\[a-zA-Z]+|(?P<name>[A-Z])(?:_\{(?P<long>\w+)\}|_(?P<short>\w))?")  # fmt: skip
_PRIMED = re.compile(r"([a-zA-Z])('+)")
_I = sympy.Symbol("i")


class _TooLargeError(Exception):
    """A number that is not written out."""


def same(true: str, given: str) -> bool:
    """Whether an answer equals the true one; what cannot be read is compared as text.

    Args:
        true: the true answer as `plain.tidy` writes it; LaTeX without delimiters.
        given: the answer, likewise.

    Raises:
        Exception: what comparing raised.
    """
    if ":" in true and ":" in given:
        return _ratios(true.split(":"), given.split(":"))
    ours, theirs = _read(true), read(given)
    if ours is None or theirs is None:
        return key(true) == key(given)
    if _is_list(true) and _is_list(given) and _length(ours) != _length(theirs):
        return False
    return _equal(_union(ours, true), _union(theirs, given))


def read(text: str) -> Any:
    """The SymPy object that math-verify reads in a text; None where it reads none."""
    text = _PRIMED.sub(lambda match: f"{match[1]}_{{p{len(match[2])}}}", text)
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _CAPITALS.sub(_indexed, text)
    if "$" in text or "\\(" in text or "\\[" in text:
        if re.search(r"\bnot\b", text):
            return None
        # Prose around formulas: math-verify looks for them.
        found = parse(text, [_LATEX, ExprExtractionConfig()], parsing_timeout=None, raise_on_error=True)
    else:
        found = parse(f"\\boxed{{{text}}}", [_LATEX], parsing_timeout=None, raise_on_error=True)
    return next((one for one in found if not isinstance(one, str)), None)


def _indexed(match: re.Match[str]) -> str:
    return f"{match['name']}_{{u{match['long'] or match['short'] or ''}}}" if match["name"] else match.group()


@lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    return read(text)


def _ratios(true: Sequence[str], given: Sequence[str]) -> bool:
    """Whether the terms of two ratios are proportional."""
    if len(true) != len(given):
        return False
    ours, theirs = ([read(term) for term in terms] for terms in (true, given))
    if not all(isinstance(term, sympy.Expr) for term in (*ours, *theirs)):
        return False
    return all(_equal(a * theirs[0], ours[0] * b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def _is_list(text: str) -> bool:
    """Whether a text is an enumeration without brackets, in which a value that comes twice counts twice."""
    return "," in text and not text.startswith(("\\{", "(", "["))


def _length(read: Any) -> int:
    return len(getattr(read, "_unsorted_args", read.args))


def _union(read: Any, text: str) -> Any:
    """Inequalities joined by `or` as the set of numbers that they leave."""
    if isinstance(read, sympy.FiniteSet) and " or" in text.replace("{", " ") and len(read.free_symbols) == 1:
        if all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in read.args):
            return sympy.Union(*(part.as_set() for part in read.args))
    return read


def _equal(true: Any, given: Any) -> bool:
    """Whether two SymPy objects are the same answer."""
    true, given = _unwrapped(true, given)
    for kinds, compare in (
        ((sympy.MatrixBase,), _equal_matrices),
        ((sympy.Set, sympy.Tuple), _equal_sets),
        ((Relational, sympy.And), _equal_relations),
    ):
        if isinstance(true, kinds) and isinstance(given, kinds):
            return compare(true, given)
    if isinstance(true, sympy.Set) and isinstance(given, Relational | sympy.And):
        given = _as_set(given)
        return given is not None and _equal_sets(true, given)
    if isinstance(given, sympy.Set) and isinstance(true, Relational | sympy.And):
        true = _as_set(true)
        return true is not None and _equal_sets(true, given)
    if isinstance(true, sympy.Expr) and isinstance(given, sympy.Expr):
        return _equal_expressions(true, given)
    if isinstance(true, sympy.FiniteSet) or isinstance(given, sympy.FiniteSet):
        return _equal_sets(*(one if isinstance(one, sympy.Set) else sympy.FiniteSet(one) for one in (true, given)))
    return False


def _unwrapped(true: Any, given: Any) -> tuple[Any, Any]:
    """`x = 5` as 5 where the other one is no equation; a chain of equations as the last one's value."""
    sides = []
    for one, other in ((true, given), (given, true)):
        parts = getattr(one, "_unsorted_args", ()) if isinstance(one, sympy.And) else (one,)
        if parts and all(isinstance(part, sympy.Eq) for part in parts):
            name = parts[0].lhs
            named = (
                isinstance(name, sympy.Tuple | sympy.Set)
                or is_expr_of_only_symbols(name)
                or not name.free_symbols
                and _equal(name, parts[-1].rhs)
            )
            if named and not isinstance(other, Relational | sympy.And):
                one = parts[-1].rhs
            elif len(parts) > 1:
                one = sympy.Eq(name, parts[-1].rhs, evaluate=False)
        sides.append(one)
    return sides[0], sides[1]


def _equal_matrices(true: Any, given: Any) -> bool:
    return true.shape == given.shape and all(map(_equal, true.flat(), given.flat()))


def _equal_relations(true: Any, given: Any) -> bool:
    if isinstance(true, sympy.Eq) and isinstance(given, sympy.Eq) and true.lhs == given.lhs:
        return _equal(true.rhs, given.rhs)
    if true.free_symbols == given.free_symbols and not isinstance(true, sympy.Eq) and not isinstance(given, sympy.Eq):
        ours, theirs = _as_set(true), _as_set(given)
        if ours is not None and theirs is not None:
            return _equal_sets(ours, theirs)
    return _verified(true, given)


def _as_set(relation: Any) -> Any:
    """The numbers for which a relation of one variable holds; None where it has more, or SymPy cannot say."""
    if len(relation.free_symbols) != 1 or relation.has(AppliedUndef) or isinstance(relation, sympy.Eq):
        return None
    try:
        return relation.as_set()
    except NotImplementedError:
        return None


def _equal_sets(true: Any, given: Any) -> bool:
    """Intervals by their ends, lists and sets by their elements: in order where one is a tuple."""
    if isinstance(true, sympy.Interval) and isinstance(given, sympy.Interval):
        return (true.left_open, true.right_open) == (given.left_open, given.right_open) and (
            _equal(true.start, given.start) and _equal(true.end, given.end)
        )
    if isinstance(true, sympy.Union) and isinstance(given, sympy.Union):
        return _matched(true.args, given.args)
    ours, theirs = _elements(true), _elements(given)
    if ours is None or theirs is None:
        return _verified(true, given)
    if len(ours) != len(theirs):
        return False
    ordered = not isinstance(true, sympy.FiniteSet) or not isinstance(given, sympy.FiniteSet)
    if ordered or _named(ours) != _named(theirs):
        return all(map(_equal, ours, theirs))
    return _matched(true.args, given.args)


def _elements(read: Any) -> Sequence[Any] | None:
    """Elements in the order in which they are written; an open interval is written like a pair."""
    if isinstance(read, sympy.FiniteSet):
        return getattr(read, "_unsorted_args", read.args)
    if isinstance(read, sympy.Interval) and read.is_open:
        return (read.start, read.end)
    return read.args if isinstance(read, sympy.Tuple) else None


def _named(elements: Sequence[Any]) -> bool:
    """Whether the elements are values of different variables, so that their order says which is whose."""
    return len({one.lhs for one in elements if isinstance(one, sympy.Eq)}) > 1


def _matched(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether each of ours is one of theirs, one to one."""
    rest = list(theirs)
    for one in ours:
        place = next((at for at, other in enumerate(rest) if _equal(one, other)), None)
        if place is None:
            return False
        del rest[place]
    return not rest


def _equal_expressions(true: Any, given: Any) -> bool:
    if true == given:
        return not true.has(sympy.nan, sympy.zoo)
    if true.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) or given.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return False
    if isinstance(true, sympy.Symbol) or isinstance(given, sympy.Symbol):
        # A word is a symbol or a product of letters.
        if true.is_Mul or given.is_Mul or true.is_Symbol and given.is_Symbol:
            return _verified(true, given)
    if true.has(*_UNEVALUATED) or given.has(*_UNEVALUATED):
        return _verified(true, given)
    if not (true.free_symbols | given.free_symbols) - {_I}:
        return _equal_numbers(true, given)
    return _agree(true, given)


def _equal_numbers(true: Any, given: Any) -> bool:
    """Whether two numbers are equal: as fractions where they are rational, else up to DIGITS digits."""
    values = []
    for one in (true, given):
        try:
            values.append(exact(one))
        except _TooLargeError:
            return False
    decimals = [isinstance(one, sympy.Float) for one in (true, given)]
    if None not in values and (values[0] == values[1] or decimals[0] == decimals[1]):
        return values[0] == values[1]
    if decimals[0] != decimals[1]:
        decimal, other = (0, 1) if decimals[0] else (1, 0)
        value = values[other]
        if value is None:
            value = (true, given)[other].evalf(50)
            if not value.is_Float:
                return False
            value = Fraction(str(value))
        return is_rounding(values[decimal], value)
    return _is_zero(_rational(true) - _rational(given), {})


def exact(number: Any) -> Fraction | None:
    """The value of a rational expression; None where it is irrational, or not known to be rational.

    Raises:
        _TooLargeError: it has more than MOST_BITS bits.
    """
    if isinstance(number, sympy.Rational):
        return Fraction(int(number.p), int(number.q))
    if isinstance(number, sympy.Float):
        return Fraction(str(number))
    if isinstance(number, sympy.UnevaluatedExpr):
        return exact(number.args[0])
    if not isinstance(number, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.binomial):
        return None
    values = [exact(part) for part in number.args]
    if None in values:
        return None
    first, last = values[0], values[-1]
    if isinstance(number, sympy.Add | sympy.Mul):
        total = values[0]
        for value in values[1:]:
            total = total + value if number.is_Add else total * value
            _check_size(total, 1)
        return total
    if last.denominator != 1 or isinstance(number, sympy.binomial | sympy.factorial) and first.denominator != 1:
        return None
    if isinstance(number, sympy.Pow):
        _check_size(first, abs(int(last)))
        return None if first == 0 and last < 0 else first**last
    if first < 0 or last < 0:
        return None
    _check_size(Fraction(abs(first) + 1), int(first))
    return Fraction(int(number.func(*map(int, values))))


def _check_size(value: Fraction, times: int) -> None:
    if abs(value) != 1 and max(value.numerator.bit_length(), value.denominator.bit_length()) * times > MOST_BITS:
        raise _TooLargeError


def _rational(expression: Any) -> Any:
    """The expression with its decimals as the fractions they are, and i as the imaginary unit."""
    swaps = {decimal: sympy.Rational(str(decimal)) for decimal in expression.atoms(sympy.Float)}
    swaps |= {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(swaps) if swaps else expression


def _is_zero(difference: Any, values: dict[Any, Any]) -> bool | None:
    """Whether a difference vanishes at a point; None where it has no value there."""
    value = difference.evalf(15, subs=values, maxn=DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    real, imaginary = value.as_real_imag()
    # SymPy gives a sum that cancels to all digits the precision of one bit.
    return all(not part or part.is_Float and part._prec == 1 for part in (real, imaginary))


def _agree(true: Any, given: Any) -> bool:
    """Whether two expressions agree at points that no identity but a true one meets.

    At negative points they may both have no real value: log(x^2) is 2 log(x) where that is real.
    """
    ours, theirs = _rational(true), _rational(given)
    names = sorted({symbol.name for symbol in ours.free_symbols | theirs.free_symbols})
    difference, met = ours - theirs, False
    for number, point in enumerate(_POINTS):
        steps = enumerate(names)
        place = {name: point + sympy.sign(point) * sympy.Rational(at * (7 - number), 13) for at, name in steps}
        values = {symbol: place[symbol.name] for symbol in difference.free_symbols}
        verdict = _is_zero(difference, values)
        if verdict is False:
            if point > 0 or all(one.evalf(15, subs=values).is_real for one in (ours, theirs)):
                return False
        met |= verdict is True
    return met or _verified(true, given)


def _verified(true: Any, given: Any) -> bool:
    """math-verify's own comparison, with exact decimals."""
    ours, theirs = (_rational(one) if isinstance(one, sympy.Expr) else one for one in (true, given))
    return verify(
        ours, theirs, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
    )
