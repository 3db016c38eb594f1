"""Reasoning formats: how the reasoning before an answer's content is marked, and its parsers.

`formats.py`: their interface; `think_tags.py`: <think> tags; `harmony.py`: the channels of gpt-oss.
"""

from frontend.reasoning.formats import (
    ParsedText,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
)
from frontend.reasoning.harmony import HARMONY
from frontend.reasoning.think_tags import DEEPSEEK_R1, QWEN3

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "QWEN3",
    "ParsedText",
    "ReasoningFormat",
    "ReasoningParser",
    "ReasoningStart",
]
