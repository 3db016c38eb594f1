"""Alibaba's Bailian traces: JSONL with one id per 16 tokens of the prompt, and the chat that a request continues.

An id stands for the contents of its block alone, so ids may repeat within a prompt.
"""

from __future__ import annotations

from traces.fields import json_fields
from traces.formats.base import LineFormat, SourceSettings, TraceRecord
from traces.prompt_blocks import PromptBlocks
from traces.row import TraceRow

_NO_PARENT = -1
_MOST = 1 << 62


class BailianFormat(LineFormat):
    """Bailian's traces. A session is a chat and all that continue it, named by the first one."""

    name = "bailian"
    usual_block_tokens = 16

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._first_chat: dict[int, int] = {}  # of chats that continue another one

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the line's request."""
        fields = json_fields(record.value, record.place)
        chat = fields.integer("chat_id", least=0, most=_MOST)
        parent = fields.integer("parent_chat_id", least=_NO_PARENT, most=_MOST)
        timestamp_s = fields.time("timestamp", unit="seconds")
        input_length = fields.tokens("input_length", least=1)
        output_length = fields.tokens("output_length", least=0)
        fields.text("type")
        fields.integer("turn", least=1, most=_MOST)
        ids = fields.ids("hash_ids", input_length=input_length, block_tokens=self.source_block_tokens)
        blocks = PromptBlocks(self.block_tokens)
        blocks.append_ids(ids, input_length, self.source_block_tokens)
        first = chat if parent == _NO_PARENT else self._first_chat.get(parent, parent)
        if first != chat:
            self._first_chat[chat] = first
        return [self._row(round(timestamp_s * 1000), input_length, output_length, blocks.ids(), str(first))]
