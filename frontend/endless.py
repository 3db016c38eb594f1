"""Endless requests at the door: what they may ask, and the rolling window that they get. Pure."""

from frontend.api.request_models import EndlessWindow, GenerationBody
from frontend.errors import FrontendConfigError, InvalidRequest
from moonpool_proto.v1 import worker_pb2


def check_endless(body: GenerationBody, max_tokens: int | None) -> None:
    """Raise InvalidRequest for an endless request that has a limit, several choices or no streaming."""
    problem = ""
    if not body.stream:
        problem = "must be streamed: set stream to true"
    elif max_tokens is not None:
        problem = "must not have a limit: omit max_tokens"
    elif body.num_choices > 1:
        problem = f"must have one choice, got n = {body.num_choices}: send several requests"
    if problem:
        raise InvalidRequest(f"an endless answer {problem}", param="endless")


def check_default_window(window: int, *, block_tokens: int, max_positions: int, model: str) -> None:
    """Raise FrontendConfigError if the configured window suits no request of the model; 0 is always suitable."""
    try:
        rolling_window(True, window, block_tokens=block_tokens, max_model_len=max_positions)
    except InvalidRequest as error:
        raise FrontendConfigError(f"--endless-window does not suit model {model!r}: {error}") from error


def rolling_window(
    asked: bool | EndlessWindow | None, default_window: int, *, block_tokens: int, max_model_len: int
) -> worker_pb2.RollingWindow | None:
    """Return the window of an endless request; None if everything stays visible. Raises InvalidRequest.

    `default_window`: tokens of the window of a request that names none; 0: it has none. `max_model_len`: 0 if unknown.
    """
    if asked is None:
        return None
    if isinstance(asked, EndlessWindow):
        sinks, window, param, what = asked.sinks, asked.window, "endless.window", "the window"
    else:
        sinks, window, param, what = None, default_window, "endless", "the window of --endless-window"
    if not window:
        return None
    most = max(0, max_model_len // block_tokens - 1) * block_tokens
    whole = window // block_tokens * block_tokens
    if whole < 2 * block_tokens or (max_model_len and whole > most):
        raise InvalidRequest(
            f"{what} must have {2 * block_tokens} to {most} tokens: at least two "
            f"blocks of {block_tokens}, and a block less than max_model_len ({max_model_len}); got {window}",
            param=param,
        )
    if sinks is not None and sinks > block_tokens // 2:
        raise InvalidRequest(
            f"sinks must be at most {block_tokens // 2}, half of a block, got {sinks}", param="endless.sinks"
        )
    return worker_pb2.RollingWindow(sinks=sinks, window=whole, slide=slide_of(whole, block_tokens))


def slide_of(window: int, block_tokens: int) -> int:
    """Return the tokens by which a window slides at once: an eighth of it, in whole blocks."""
    return max(1, window // 8 // block_tokens) * block_tokens
