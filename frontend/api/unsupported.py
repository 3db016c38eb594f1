"""Fields of OpenAI's and vLLM's that are not served yet: accepted at their neutral value, else refused by name."""

from collections.abc import Mapping
from typing import Any, Final

# Any of these values (and null) asks for nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
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
