"""Fields of OpenAI's and vLLM's that are not served yet: accepted at their neutral value, else refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

# Any of these values (and null) asks for nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
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


def unsupported_field(fields: Mapping[str, Any]) -> str | None:
    """The first of `fields` that asks for something not served. Fields unknown to everybody are ignored, as in vLLM."""
    for name, value in fields.items():
        if value is None or name not in _NEUTRAL:
            continue
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
        ):
            return name
    return None


def refused_fields() -> Mapping[str, Sequence[Any]]:
    """The fields by name, each with the values that ask for nothing."""
    return _NEUTRAL
