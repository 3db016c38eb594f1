"""Where the messages of a chat stand in its rendered text: found by rendering once more, with marks around them. Pure.

A template may do anything with a message: trim it, drop a part, quote it. Marks go inside of a message's outer
whitespace, so that trimming does what it did; where the text without its marks is not the text of before, or a
message's marks do not both come back with the message between them, nothing is said about it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ContentSpan:
    """The content of message `index`, without the whitespace at its end, is text[start:end]."""

    index: int
    start: int
    end: int


def content_spans(
    text: str, chat: Sequence[Message], indices: Collection[int], render: Callable[[Sequence[Message]], str], nonce: str
) -> list[ContentSpan]:
    """Spans in `text`, which `render(chat)` gave, of the messages `indices`, in the order of the text.

    Their contents must be texts. `nonce` is a text without `:` that no client can guess.
    """
    wanted = frozenset(indices)
    marked = [_marked(message, nonce, at) if at in wanted else message for at, message in enumerate(chat)]
    pieces = re.split(f"\ue000{re.escape(nonce)}:(\\d+)([<>])\ue001", render(marked))
    if "".join(pieces[::3]) != text:
        return []
    opened: dict[int, list[int]] = {}
    closed: dict[int, list[int]] = {}
    at = 0
    for piece, number, kind in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
        at += len(piece)
        (opened if kind == "<" else closed).setdefault(int(number), []).append(at)
    spans = []
    for index in indices:
        starts, ends = opened.get(index, []), closed.get(index, [])
        if len(starts) == len(ends) == 1:
            content = chat[index]["content"].rstrip()
            start = ends[0] - len(content)  # with the whitespace at its beginning, if that is still there
            if start >= 0 and text[start : ends[0]] == content:
                spans.append(ContentSpan(index, start, ends[0]))
    spans.sort(key=lambda span: span.start)
    return spans


def _marked(message: Message, nonce: str, index: int) -> dict[str, Any]:
    content = message["content"]
    core = content.strip()
    at = content.find(core)
    before, after = content[:at], content[at + len(core) :]
    marked = f"{before}\ue000{nonce}:{index}<\ue001{core}\ue000{nonce}:{index}>\ue001{after}"
    return {**message, "content": marked}
