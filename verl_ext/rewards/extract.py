"""The final answer in a response: the last `Answer:` line or the last `\\boxed{}`. String work, linear in the text."""

from __future__ import annotations

import re

_ANSWER = re.compile(r"answer[*_\s}]*[:：]", re.IGNORECASE)
# What may stand between `Answer:` and the answer: ends of the command or tag around the word, and space.
_GAP = re.compile(r"(?:[\s*_}~]|\\[,;:! ]|\\q?quad(?![a-zA-Z])|</?[a-zA-Z]{1,10}>)*")
_CLOSERS = "}])\\$*_ \t\r\n"
_LABEL = re.compile(r"(?:\\text(?:bf|it|rm)?\s*\{)?\s*(?:final\s+)?answer[*_\s}]*[:：][\s}~]*", re.IGNORECASE)
# `The probability is 3/8`.
_SENTENCE = re.compile(r"[A-Za-z][A-Za-z' -]{1,80} (?:is|are|equals)\s*:?\s+(?=[-\d\\$({.+])")
# `see the box above`: words only.
_POINTER = re.compile(r"[a-zA-Z\s,()*_'-]*\b(?:box|boxed|above)\b[a-zA-Z\s,.()*_'-]*", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z]{1,10}>")
_BRACES = re.compile(r"\\boxed\s*\{|\\[\\{}]|[{}]")
_DISPLAY = (("$$", "$$"), ("\\[", "\\]"))
# Words apart, so that it is not `2**3`.
_BOLD = re.compile(r"(?<!\S)\*\*([^*\s](?:[^*\n]*[^*\s])?)\*\*(?=[\s.,;:!?)]|$)")
_EMPHASIS = ("**", "__", "*", "_")
_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *((mark, mark) for mark in _EMPHASIS),
)


def final_answer(text: str, style: str = "any", unfinished_box: str = "wrong") -> str | None:
    """The text of the final answer, without bold and without the delimiters around it; None where there is none.

    Args:
        text: the response.
        style: `answer`: what follows the last `Answer:` (to the end of the line, or of a display formula; DAPO-Math's
            form); `boxed`: the content of the last complete `\\boxed{}`; `any`: whichever begins later.
        unfinished_box: where the text ends within a box that begins later: `wrong`: there is no answer; `earlier`:
            what stands before it is.
    """
    line = last_answer_line(text) if style != "boxed" else None
    box, unfinished = last_boxed(text) if style != "answer" else (None, -1)
    if box is not None and line is not None and (box[0] < line[0] < box[2] or _POINTER.fullmatch(line[1])):
        # `\\boxed{\\text{Answer: } 5}`, or `Answer: see box above`: the answer is the box's.
        line = None
    # A box within the answer's line begins later than the line: its content is the answer.
    found = max((part for part in (line, box) if part is not None), default=None)
    if unfinished_box == "wrong" and unfinished > (found[0] if found is not None else -1):
        return None
    return bare(_BOLD.sub(r"\1", found[1]) if "**" in found[1] else found[1]) if found is not None else None


def last_answer_line(text: str) -> tuple[int, str] | None:
    """(start, content) of the last `Answer:` that is followed by anything; the content may begin on a later line."""
    for match in reversed(list(_ANSWER.finditer(text))):
        start = _GAP.match(text, match.end()).end()
        if start == len(text) or not text[start:].strip(_CLOSERS):
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


def last_boxed(text: str) -> tuple[tuple[int, str, int] | None, int]:
    """(start, content, end) of the last complete `\\boxed{}`, and the start of the last one that is not ended, or -1.

    Escaped braces do not count.
    """
    first = text.find("\\boxed")
    if first < 0:
        return None, -1
    last = None
    open_braces: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text, first):
        token = match.group()
        if token == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                last = (*box, match.start())
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    unfinished = max((box[0] for box in open_braces if box is not None), default=-1)
    return (last[0], text[last[1] : last[2]], last[2]) if last is not None else None, unfinished


def bare(text: str) -> str:
    """The text without white space, delimiters, a box, a label, tags and punctuation around it."""
    # Deeper nesting is no one's answer, and would take time quadratic in the text.
    for _ in range(8):
        before, text = text, text.strip()
        if text.isalnum():
            break
        text = text.removesuffix("\\\\").rstrip(",; \t\r\n")
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                # `$a$ and $b$` begins and ends alike, but is not one formula.
                if opening not in inner and closing not in inner and not _is_script(inner, closing):
                    text = inner
        text = _without_lone_marks(_without_closers(text))
        if match := _LABEL.match(text) or _SENTENCE.match(text):
            text = text[match.end() :]
        if text.startswith("\\boxed") and (box := last_boxed(text)[0]) and box[0] == 0 and text.endswith(box[1] + "}"):
            text = box[1]
        if text == before:
            break
    return text


def _without_closers(text: str) -> str:
    """The text without tags at its ends, and closing brackets at its end that nothing in it opens."""
    if match := _TAG.match(text):
        text = text[match.end() :].lstrip()
    if text.endswith(">") and (match := _TAG.fullmatch(text, max(0, text.rfind("<")))):
        text = text[: match.start()].rstrip()
    if text.endswith(("\\]", "\\)")) and text.count("\\[") + text.count("\\(") < text.count("\\]") + text.count("\\)"):
        return text[:-2].rstrip()
    for dollars in ("$$", "$"):
        if text.endswith(dollars) and not text.endswith("\\$") and text.count("$") == len(dollars) < len(text):
            return text[: -len(dollars)].rstrip()
    if text.endswith("}") and not text.endswith("\\}"):
        if text.count("{") - text.count("\\{") < text.count("}") - text.count("\\}"):
            return text[:-1].rstrip()
    elif text.endswith(("]", ")")) and not text.endswith(("\\]", "\\)")):
        # `(0, 1]` is closed by the bracket that does not match.
        opened, closed = (sum(map(text.count, pair)) for pair in ("([", ")]"))
        if closed > opened and not text.startswith("]"):
            return text[:-1].rstrip()
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
