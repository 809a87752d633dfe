"""SymPy's objects compared exactly, beside Python's own integers and fractions."""

import math
import time
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.rewards.compare_answers import MOST_BITS, _TooLargeError, exact, read, same

small = st.integers(-9, 9)


@settings(max_examples=50, deadline=None)
@given(small, st.integers(1, 9), st.integers(0, 30), st.integers(0, 20))
def test_rational_expressions_have_their_value(a, b, power, count):
    text = f"\\frac{{{a}}}{{{b}}} + {b}^{{-{power}}} \\cdot {count}! - \\binom{{{count}}}{{2}}"
    assert exact(read(text)) == Fraction(a, b) + Fraction(math.factorial(count), b**power) - math.comb(count, 2)


@pytest.mark.parametrize("text", ["\\sqrt{2}", "\\pi", "2^{1/2}", "x", "\\sin 1", "(-1)!"])
def test_what_is_not_known_to_be_rational(text):
    assert exact(read(text)) is None


@pytest.mark.parametrize("text", ["9^{9^{9^9}}", "9^{9^9}", "1/9^{9^9}", "10000000!", "2^{9999999}"])
def test_what_is_too_large_is_neither_written_out_nor_equal(text):
    started = time.process_time()
    with pytest.raises(_TooLargeError):
        exact(read(text))
    assert not same("5", text) and not same(text, "5") and not same(text, f"{text}+1") and same(text, text)
    assert time.process_time() - started < 1.0


def test_the_largest_number_that_is_written_out():
    assert exact(sympy.Pow(2, MOST_BITS // 2 - 1, evaluate=False)) == 2 ** (MOST_BITS // 2 - 1)
    with pytest.raises(_TooLargeError):
        exact(sympy.Pow(2, MOST_BITS, evaluate=False))


@settings(max_examples=25, deadline=None)
@given(small, small, small, st.integers(1, 5))
def test_a_product_is_its_expansion_and_nothing_near_it(a, b, c, scale):
    product = f"(x+{a})({b}x+y-{c})".replace("+-", "-").replace("--", "+")
    x, y = sympy.symbols("x y")
    expanded = sympy.expand((x + a) * (b * x + y - c))
    assert same(product, sympy.latex(expanded))
    assert not same(product, sympy.latex(expanded + sympy.Rational(scale, 10**9)))
    assert not same(product, sympy.latex(expanded.subs(y, y + x * scale)))


@pytest.mark.parametrize(
    ("true", "other"),
    [
        ("\\ln(x^2)", "2\\ln x"),
        ("\\sin^2 x + \\cos^2 x", "1"),
        ("\\sqrt{4-x^2}", "(4-x^2)^{1/2}"),
        ("x^{1/3}", "\\sqrt[3]{x}"),
    ],
)
def test_identities_that_hold_where_both_are_real(true, other):
    assert same(true, other)


@pytest.mark.parametrize(
    ("true", "other"),
    [("|x|", "x"), ("\\sqrt{x^2}", "x"), ("\\lfloor x\\rfloor", "x"), ("x", "x+10^{-40}"), ("e^{-1000}x", "0"),
     ("\\pi(R^2-r^2)", "0"), ("(-1)^n", "-1")],
)  # fmt: skip
def test_what_holds_at_some_points_only(true, other):
    assert not same(true, other)
