"""The final answer in a response: the last `Answer:` line or the last `\\boxed{}`. String work, linear in the text."""

from __future__ import annotations

import re

STYLES = ("any", "answer", "boxed")

_ANSWER = re.compile(r"answer[*_\s]*[:：]", re.IGNORECASE)
_BRACES = re.compile(r"\\boxed\s*\{|\\[\\{}]|[{}]")
_DISPLAY = (("$$", "$$"), ("\\[", "\\]"))
# Words apart, so that it is not `2**3`.
_BOLD = re.compile(r"(?<!\S)\*\*([^*\s](?:[^*\n]*[^*\s])?)\*\*(?=[\s.,;:!?)]|$)")
_EMPHASIS = ("**", "__", "*", "_")
_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *((mark, mark) for mark in _EMPHASIS),
)


def final_answer(text: str, style: str = "any") -> str | None:
    """The text of the final answer, without bold and without the delimiters around it; None where there is none.

    Args:
        text: the response.
        style: `answer`: what follows the last `Answer:` (to the end of the line, or of a display formula; DAPO-Math's
            form); `boxed`: the content of the last complete `\\boxed{}`; `any`: whichever begins later.
    """
    line = last_answer_line(text) if style != "boxed" else None
    box = last_boxed(text) if style != "answer" else None
    # A box within the answer's line begins later than the line: its content is the answer.
    found = max((part for part in (line, box) if part is not None), default=None)
    return bare(_BOLD.sub(r"\1", found[1])) if found is not None else None


def last_answer_line(text: str) -> tuple[int, str] | None:
    """(start, content) of the last `Answer:` that is followed by anything; the content may begin on a later line."""
    for match in reversed(list(_ANSWER.finditer(text))):
        start = match.end()
        while start < len(text) and text[start] in " \t\r\n*_":
            start += 1
        if start == len(text):
            continue
        for opening, closing in _DISPLAY:
            if text.startswith(opening, start):
                end = text.find(closing, start + len(opening))
                if end >= 0:
                    return match.start(), text[start : end + len(closing)]
        # Marks right before the content may open its emphasis, which closes behind it.
        while text[start - 1] in "*_":
            start -= 1
        end = text.find("\n", start)
        return match.start(), text[start : end if end >= 0 else len(text)]
    return None


def last_boxed(text: str) -> tuple[int, str] | None:
    """(start, content) of the last complete `\\boxed{}`; one that is cut off is none, escaped braces do not count."""
    first = text.find("\\boxed")
    if first < 0:
        return None
    last = None
    open_braces: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text, first):
        token = match.group()
        if token == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                last = box[0], text[box[1] : match.start()]
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    return last


def bare(text: str) -> str:
    """The text without white space, delimiters, a box and a full stop around it."""
    # Deeper nesting is no one's answer, and would take time quadratic in the text.
    for _ in range(8):
        before, text = text, text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                # `$a$ and $b$` begins and ends alike, but is not one formula.
                if opening not in inner and closing not in inner and not _is_script(inner, closing):
                    text = inner
        text = _without_lone_marks(text)
        if text.startswith("\\boxed") and (box := last_boxed(text)) and box[0] == 0 and text.endswith(box[1] + "}"):
            text = box[1]
        if text == before:
            break
    return text


def _without_lone_marks(text: str) -> str:
    """The text without a mark of emphasis at one end of it: the other one of the pair stood around `Answer:`, too."""
    for mark in _EMPHASIS:
        rest = text[len(mark) :]
        # `_{5}P` begins with a subscript.
        if text.startswith(mark) and rest and mark not in rest and not (mark == "_" and rest.startswith("{")):
            return rest
        rest = text[: -len(mark)]
        if text.endswith(mark) and rest and mark not in rest and not _is_script(rest, mark):
            # `x_*` has a subscript.
            return text if mark == "*" and rest.endswith("_") else rest
    return text


def _is_script(before: str, mark: str) -> bool:
    """Whether a mark of emphasis behind this text is a part of its LaTeX: `a^*`, `\\_`."""
    return mark in _EMPHASIS and before.endswith(("^", "\\"))
