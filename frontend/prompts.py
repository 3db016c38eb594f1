"""From a client's text, ids or chat to the prompt's token ids, for one model."""

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.api.models import ChatMessage
from frontend.errors import InvalidRequest
from frontend.tokenizer import Tokenizer


class PromptReader:
    """Reads prompts with one model's tokenizer and chat template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name

    def prompt_ids(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """The ids of a completion's prompt. Raises InvalidRequest for an empty one and for ids of no token."""
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.check_ids(prompt, "prompt")
        return prompt

    def chat_ids(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None, *, add_special_tokens: bool
    ) -> list[int]:
        """The ids of a chat rendered with the model's template."""
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model {self._model_name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        # Templates know no "developer", which is OpenAI's newer word for "system".
        roles = ("system" if message.role == "developer" else message.role for message in messages)
        chat = [{"role": role, "content": message.text} for role, message in zip(roles, messages, strict=True)]
        text = template.render(chat, variables or {}, add_generation_prompt=True)
        # The template writes the special tokens itself.
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
        return ids

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest for an id outside the vocabulary."""
        if ids and max(ids) >= self._tokenizer.vocab_size:
            size = self._tokenizer.vocab_size
            raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {size} tokens", param=param)
