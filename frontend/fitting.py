"""Chats that fit into the context, the oldest turns left out where they would not."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from frontend.api.models import ChatMessage, ChatRendering
from frontend.errors import InvalidRequest
from frontend.prompts import ChatPrompt, PromptReader
from frontend.tokenizer import Tokenizer
from frontend.truncation import first_kept, head_length

_STEPS: Final = 16  # of the context: room for estimates, and max_tokens that vary less make no difference
_FALLBACK_OVERHEAD: Final = 8


class ChatFitter:
    """For one model. Thread-safe."""

    def __init__(self, reader: PromptReader, tokenizer: Tokenizer) -> None:
        self._reader = reader
        self._tokenizer = tokenizer

    def fitting(
        self,
        messages: Sequence[ChatMessage],
        rendering: ChatRendering,
        *,
        limit: int,
        wanted: int,
        add_special_tokens: bool,
        scope: Sequence[str],
    ) -> tuple[ChatPrompt, int]:
        """(prompt, how many messages were left out so that it has at most `limit` - `wanted` tokens).

        The head and the last turn are always in it, even if they alone are too long.
        """

        def read(kept: Sequence[ChatMessage]) -> ChatPrompt:
            return self._reader.chat(kept, rendering, add_special_tokens=add_special_tokens, scope=scope)

        prompt = read(messages)
        if len(prompt.token_ids) + wanted <= limit:
            return prompt, 0
        roles = [message.role for message in messages]
        head = head_length(roles)
        if head == len(roles):
            return prompt, 0
        sizes = [self._size(message) for message in messages]
        fixed = self._fixed(messages[:head], rendering)
        step = -(-limit // _STEPS)
        most = limit - step * (1 - (-wanted // step))
        start = head
        for share in range(_STEPS, -1, -2):  # sizes are estimates: if they were too small, drop more
            budget = max(0, most) * share // _STEPS
            at = first_kept(roles, sizes, fixed=fixed, budget=budget, target=budget // 2)
            if at == start:
                continue
            start = at
            prompt = read([*messages[:head], *messages[start:]])
            if len(prompt.token_ids) + wanted <= limit:
                break
        return prompt, start - head

    def _size(self, message: ChatMessage) -> int:
        calls = [call.function.model_dump() for call in message.tool_calls or ()]
        text = message.text + (json.dumps(calls) if calls else "")
        return self._overhead + len(self._tokenizer.encode(text, add_special_tokens=False))

    def _fixed(self, head: Sequence[ChatMessage], rendering: ChatRendering) -> int:
        """Tokens of the head, of the tools, and of what opens the answer."""
        shape = ChatRendering(chat_template_kwargs=rendering.chat_template_kwargs, tools=rendering.tools)
        try:
            return len(self._reader.chat_ids([*head, _WORD], shape, add_special_tokens=False)) - self._overhead - 1
        except InvalidRequest:  # the template wants more than that
            return sum(map(self._size, head))

    @cached_property
    def _overhead(self) -> int:
        """Tokens that the template puts around a message."""
        shape = ChatRendering()
        try:
            one, three = (
                len(self._reader.chat_ids(chat, shape, add_special_tokens=False))
                for chat in ([_WORD], [_WORD, _WORD_BACK, _WORD])
            )
        except InvalidRequest:
            return _FALLBACK_OVERHEAD
        return max(1, -(-(three - one) // 2) - 1)


_WORD: Final = ChatMessage.model_validate({"role": "user", "content": "a"})
_WORD_BACK: Final = ChatMessage.model_validate({"role": "assistant", "content": "a"})
