"""How a question is put to the policy.

`dapo` is the text of the published DAPO-Math-17K and AIME-2024 rows, which ask for a last line `Answer: ...`; `boxed`
asks for the answer in \\boxed{}, as the prompts of Qwen2.5-Math and DeepSeek-R1-Distill do. Training and validation
data should be made with the same one.
"""

from __future__ import annotations

_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

TEMPLATES = {
    "dapo": _BEFORE + "{question}" + _AFTER,
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
}


def ask(question: str, template: str) -> list[dict[str, str]]:
    """The messages that put a question: one of the user's."""
    return [{"role": "user", "content": TEMPLATES[template].replace("{question}", question)}]


def question_of(content: str) -> str:
    """The bare question of a published DAPO prompt.

    Raises:
        ValueError: the text is not wrapped as the published prompts are.
    """
    text = content.strip()
    if not (text.startswith(_BEFORE) and text.endswith(_AFTER)):
        raise ValueError(
            "the prompt is not wrapped in DAPO's instructions, so its question cannot be put otherwise; "
            "--template dapo keeps prompts as they are"
        )
    return text[len(_BEFORE) : -len(_AFTER)]
