"""From a body's fields to how its tokens are drawn."""

import secrets
from collections.abc import Sequence

from frontend.api.models import GenerationBody
from frontend.config import FrontendConfig
from frontend.errors import InvalidRequest
from frontend.request import SamplingParams


def sampling_of(
    body: GenerationBody, config: FrontendConfig, *, max_tokens: int, eos_token_ids: Sequence[int]
) -> SamplingParams:
    """The parameters that `body` asks for, a seed drawn where it names none. Raises InvalidRequest."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),  # vLLM's -1 is off, too
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        stop=_stops(body.stop, config),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        eos_token_ids=tuple(eos_token_ids),
        ignore_eos=bool(body.ignore_eos),
    )


def _stops(stop: list[str] | None, config: FrontendConfig) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(stop or ()))
    if len(stops) > config.max_stop_strings:
        raise InvalidRequest(f"{len(stops)} stop strings: at most {config.max_stop_strings} are taken", param="stop")
    for text in stops:
        if not 0 < len(text) <= config.max_stop_chars:
            raise InvalidRequest(f"a stop string has 1 to {config.max_stop_chars} characters", param="stop")
    return stops
