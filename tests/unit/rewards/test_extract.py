"""Where the final answer of a response is found."""

import time

import pytest

from verl_ext.rewards.extract import bare, final_answer, last_boxed


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
        ("\\boxed{4} but then \\boxed{12", None),
        ("\\boxed{12 and \\boxed{4}", "4"),
        ("\\boxed{12 so\nAnswer: 4", "4"),
        ("Answer: 4, so \\boxed{12", None),
        ("\\[Answer: 009\\]", "009"),
        ("\\(Answer: 5\\)", "5"),
        ("[Answer: 5]", "5"),
        ("[Answer: (0, 1]]", "(0, 1]"),
        ("Answer: [0, 1)", "[0, 1)"),
        ("\\textbf{Answer:} 5", "5"),
        ("\\textbf{Answer}: 5", "5"),
        ("\\textbf{Answer: 5}", "5"),
        ("\\textbf{Answer: \\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\[\\text{Answer: } 5\\]", "5"),
        ("$$\\textbf{Answer:}\\quad 5$$", "5"),
        ("<answer>Answer: 5</answer>", "5"),
        ("<b>Answer:</b> 5", "5"),
        ("<answer>Answer: 0 < x</answer>", "0 < x"),
        ("Answer: 5,", "5"),
        ("Answer: 5;", "5"),
        ("Answer: 5 \\\\", "5"),
        ("\\boxed{\\text{Answer: } 5}", "5"),
        ("\\boxed{Answer: $5$}", "5"),
        ("\\boxed{5}\nAnswer: see box above", "5"),
        ("\\boxed{5}\n**Answer:** as boxed above.", "5"),
        ("\\boxed{5}\nAnswer: 6, see above", "6, see above"),
        ("Answer: The answer is 5", "5"),
        ("Answer: The probability is \\frac{3}{8}.", "\\frac{3}{8}"),
        ("Answer: it is not 5", "it is not 5"),
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


def test_a_box_that_is_not_ended_is_a_setting():
    text = "\\boxed{4} but then \\boxed{12"
    assert final_answer(text, "boxed") is None
    assert final_answer(text, "boxed", "earlier") == final_answer(text, "any", "earlier") == "4"
    assert final_answer("Answer: 3\n" + text, "answer") == "3"


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
    [
        "\\boxed{x}}",
        "<b>",
        "</b>",
        "answer: }",
        "[",
        "]",
        ",",
        "~",
        "is ",
        "answer: ",
        "\\boxed{",
        "{}",
        "answer" + " " * 50,
        "\\boxed{1}",
        "Answer: $$ ",
        "}",
        "\\",
        "$",
        "*",
        "_",
        ". ",
    ],
)
def test_time_is_linear_in_100_kB_of_repeated_text(unit):
    text = unit * (100_000 // len(unit))
    started = time.process_time()
    final_answer(text)
    final_answer("Answer: " + text)
    last_boxed("\\boxed{1" * 10_000 + "}" * 10_000)
    bare("\\boxed{" * 7000 + "1" + "}" * 7000)
    # Linear, each takes some hundredths of a second; quadratic, minutes.
    assert time.process_time() - started < 2.0
