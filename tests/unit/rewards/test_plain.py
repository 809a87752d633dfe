"""Numbers, units, bases and clocks as text; what needs mathematics is left open."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.rewards.decide import decide, split_unit
from verl_ext.rewards.plain import formula, is_rounding, number, tidy

fractions = st.fractions(max_denominator=10**6)


@given(fractions)
def test_every_writing_of_a_fraction_has_its_value(value):
    over, under = value.numerator, value.denominator
    assert number(f"{over}/{under}").value == value
    assert number(f"\\frac{{{3 * over}}}{{{3 * under}}}").value == value
    whole, rest = divmod(abs(over), under)
    mixed = number(f"{'-' if over < 0 else ''}{whole}\\frac{{{rest}}}{{{under}}}")
    assert mixed.value == value and not mixed.decimal


@given(st.integers(-(10**30), 10**30), st.integers(0, 25))
def test_every_writing_of_a_decimal_has_its_value(digits, places):
    value = Fraction(digits, 10**places)
    sign, text = "-" if digits < 0 else "", str(abs(digits)).zfill(places + 1)
    point = f"{sign}{text[: len(text) - places]}.{text[len(text) - places :]}"
    assert number(point).value == value
    assert number(f"{digits}\\times 10^{{-{places}}}").value == value
    assert number(tidy(f"{digits}e-{places}")).value == value
    assert number(f"{sign}{int(text):,}").value == digits


@given(st.integers(0, 10**6), st.integers(1, 10**4).filter(lambda n: n % 10))
def test_a_repeating_decimal_is_the_fraction(whole, period):
    text = str(period)
    expected = whole + Fraction(period, 10 ** len(text) - 1)
    assert number(f"{whole}.\\overline{{{text}}}").value == number(f"{whole}.({text})").value == expected


@given(fractions.filter(lambda value: value.denominator > 1), st.integers(6, 12))
def test_a_decimal_is_a_rounding_where_it_is_the_nearest_or_cut_off(value, places):
    scaled = value * 10**places
    long_enough = abs(scaled) >= 10**5 + 1
    for digits in (round(scaled), int(scaled)):
        decimal = Fraction(digits, 10**places)
        # Zeros at its end are not written.
        if long_enough and digits % 10:
            assert is_rounding(decimal, value)
    for digits in (round(scaled) + 2, round(scaled) - 2):
        assert digits % 10 == 0 or not is_rounding(Fraction(digits, 10**places), value)


@pytest.mark.parametrize("text", ["", "x", "1/0", "\\frac{1}{0}", "1e99999999", "9^{9^9}", "1,23", "1..2", "--1", "."])
def test_what_is_no_plain_number(text):
    assert number(tidy(text)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 cm", ("5", "cm")),
        ("5\\text{ centimeters}", ("5", "cm")),
        ("5 m", ("5", "m")),
        ("5m", ("5m", None)),
        ("5 x", ("5 x", None)),
        ("12 square inches", ("12", "in^2")),
        ("12 in^2", ("12", "in^2")),
        ("60 km/h", ("60", "km/h")),
        ("60\\text{ km}/\\text{h}", ("60", "km/h")),
        ("60 miles per hour", ("60", "mi/h")),
        ("\\$5", ("5", "dollar")),
        ("5 dollars", ("5", "dollar")),
        ("50%", ("50", "%")),
        ("1\\text{ and }2", ("1\\text{ and }2", None)),
        ("1 or 2", ("1 or 2", None)),
        ("\\cos 36^\\circ", ("\\cos 36^\\circ", None)),
        ("x+1", ("x+1", None)),
        ("5 k", ("5 k", None)),
        ("\\sum_{k=1}^{4} m", ("\\sum_{k=1}^{4} m", None)),
        ("5 million", ("5 million", None)),
        ("5\\text{ squared}", ("5\\text{ squared}", None)),
    ],
)
def test_units(text, expected):
    assert split_unit(tidy(text)) == expected


@pytest.mark.parametrize(
    ("true", "other", "verdict"),
    [
        ("3:30", "4:40", False),
        ("1:25:30", "1:25:30", True),
        ("1:25:30", "1:25:31", False),
        ("15:30", "3:30 p.m.", True),
        ("12:30 am", "0:30", True),
        ("12:30 pm", "12:30", True),
        ("12:30 pm", "0:30", False),
        ("0:1", "0:2", True),
        ("2:3", "4:6", True),
        ("FF_{16}", "ff_{16}", True),
        ("0101_2", "101_2", True),
        ("x+1", "1+x", ("x+1", "1+x")),
        ("ab", "ba", ("ab", "ba")),
        ("3\\pi\\text{ cm}", "2\\pi+\\pi cm", ("3\\pi", "2\\pi+\\pi")),
    ],
)
def test_decided_by_the_text(true, other, verdict):
    assert decide(tidy(true), tidy(other)) == verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The area is $12\\pi$ in all", "12\\pi"),
        ("$5$ cm", "5 \\text{cm}"),
        ("$5$ and $6$.", "5 and 6"),
        ("$x=5$, where $y=3$", "$x=5$, where $y=3$"),
        ("not $5$", "not $5$"),
        ("\\(5\\)", "5"),
        ("\\$5", "\\$5"),
        ("5", "5"),
    ],
)
def test_the_formula_in_prose(text, expected):
    assert formula(text) == expected


@given(st.text(alphabet="0123456789.,:/\\{}()[]^_$% abfrcsqtxem'-+*", max_size=60))
def test_any_text_is_equal_to_itself_and_raises_nothing(text):
    assert decide(tidy(text), tidy(text)) is True
    assert tidy(tidy(text)) is not None
    decide(tidy("5 cm"), tidy(formula(text)))
