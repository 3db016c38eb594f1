"""Formats of tool calls: how models write them, grammars that prescribe them, and parsers.

`calls.py`: their interface; `json_calls.py`: calls as JSON objects; `named_calls.py`: those of Mistral's newer models;
`xml_calls.py`: those of Qwen3-Coder; `harmony_calls.py`: those of gpt-oss; `sections.py`: the parser of calls between
markers; `scanning.py`: matching of incomplete text; `schemas.py`: schemas of arguments for grammars.
"""

from frontend.tool_formats.calls import CallDelta, ToolDelta, ToolFormat, ToolReader, ToolSpec
from frontend.tool_formats.harmony_calls import OPENAI
from frontend.tool_formats.json_calls import HERMES, LLAMA3_JSON, MISTRAL
from frontend.tool_formats.named_calls import ARGS, MISTRAL_NAMED
from frontend.tool_formats.xml_calls import QWEN3_CODER

__all__ = [
    "ARGS",
    "HERMES",
    "LLAMA3_JSON",
    "MISTRAL",
    "MISTRAL_NAMED",
    "OPENAI",
    "QWEN3_CODER",
    "CallDelta",
    "ToolDelta",
    "ToolFormat",
    "ToolReader",
    "ToolSpec",
]
