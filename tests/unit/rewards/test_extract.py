"""Where the final answer of a response is found."""

import time

import pytest

from verl_ext.rewards.extract import bare, final_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 17 + 17.\n\nAnswer: 34", "34"),
        ("Answer: $34$.", "34"),
        ("answer : 34\n", "34"),
        ("Answer: 3\nNo, wait.\nAnswer: 4", "4"),
        ("**Answer:** 34", "34"),
        ("**Final Answer**\n\n**Answer:**\n\n$34$\n", "34"),
        ("Answer:\n$$\n\\frac{1}{2}\n$$\n", "\\frac{1}{2}"),
        ("Answer: \\[x^2\\] as claimed", "x^2"),
        ("Answer: $\\boxed{34}$", "34"),
        ("Hence $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed {\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
        ("an open { brace, then \\boxed{7}", "7"),
        ("Answer: 3, so \\boxed{4}", "4"),
        ("\\boxed{4}\nAnswer: 3", "3"),
        ("\\boxed{4} but then \\boxed{12", "4"),
        ("Answer: ", None),
        ("Answer: 3\nAnswer:", "3"),
        ("\\boxed{", None),
        ("\\boxed{}", ""),
        ("34", None),
        ("", None),
        ("Answer: **34**", "34"),
        ("Answer: **34** cm", "34 cm"),
        ("Answer: **3** and **4**.", "3 and 4"),
        ("Answer: 2**3 + 4**5", "2**3 + 4**5"),
        ("Answer: 2 ** 3 ** 2", "2 ** 3 ** 2"),
        ("**Answer: 34**", "34"),
        ("**Answer: 34.**", "34"),
        ("**Final Answer:** **34**", "34"),
        ("**Answer:**34", "34"),
        ("**Answer:** **\n34", "34"),
        ("Answer: **34**.", "34"),
        ("Answer: *34*", "34"),
        ("Answer: __34__", "34"),
        ("Answer: ***34***", "34"),
        ("Answer: **C**", "C"),
        ("**Answer: C**", "C"),
        ("Answer: $34$", "34"),
        ("Answer: **$34$**", "34"),
        ("**Answer: $34$**", "34"),
        ("Answer: **$$\n34\n$$**", "34"),
        ("Answer: **x_1**", "x_1"),
        ("**Answer: 2*3**", "2*3"),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


def test_a_style_looks_for_nothing_else():
    text = "\\boxed{1}\nAnswer: 2"
    assert (final_answer(text, "boxed"), final_answer(text, "answer")) == ("1", "2")
    assert final_answer("Answer: 2", "boxed") is None
    assert final_answer("\\boxed{1}", "answer") is None


def test_only_what_encloses_the_whole_is_taken_off():
    assert bare("$a$ and $b$") == "$a$ and $b$"
    assert bare("  **$ 3 $**. ") == "3"
    assert bare("1, 2, ...") == "1, 2, ..."
    assert bare("\\boxed{1}+\\boxed{2}") == "\\boxed{1}+\\boxed{2}"
    assert bare("$") == "$"
    assert bare("**a** and **b**") == "**a** and **b**"
    for text in ("x_1", "2*3", "2**3", "a_{n}", "a^*", "V^{*}", "V^**", "x_*", "\\_", "_{5}P", "*", "_"):
        assert bare(text) == text
    assert bare("**a^***") == "a^*"


@pytest.mark.parametrize(
    "unit",
    ["answer: ", "\\boxed{", "{}", "answer" + " " * 50, "\\boxed{1}", "Answer: $$ ", "}", "\\", "$", "*", "_", ". "],
)
def test_time_is_linear_in_100_kB_of_repeated_text(unit):
    text = unit * (100_000 // len(unit))
    started = time.process_time()
    final_answer(text)
    final_answer("Answer: " + text)
    bare("\\boxed{" * 7000 + "1" + "}" * 7000)
    # Linear, each takes some hundredths of a second; quadratic, minutes.
    assert time.process_time() - started < 2.0
