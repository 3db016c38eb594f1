"""Base of the request bodies, and limits of their numbers."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_PRIORITY: Final = 2**31 - 1


# Fields that OpenAI or vLLM define and Moonpool does not support, each with its neutral values, which are accepted
# like null.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class RequestModel(BaseModel):
    """Base of all request bodies. `UNSUPPORTED`: fields that are rejected by name, each with its neutral values."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    # Unknown fields are kept, so that unsupported ones can be rejected by name.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def unsupported_field(cls, fields: Mapping[str, Any]) -> str | None:
        """Return the first of `fields` that requests an unsupported feature. Unknown fields are ignored, as in vLLM."""
        for name, value in fields.items():
            if value is None or name not in cls.UNSUPPORTED:
                continue
            neutral = cls.UNSUPPORTED[name]
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                return name
        return None

    def parts(self) -> Iterable["RequestModel"]:
        """Yield the model itself and the models directly inside it."""
        yield self
        for value in self.__dict__.values():
            if value is None:  # as most fields are
                continue
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, RequestModel):
                    yield item
