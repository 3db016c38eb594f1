"""Which of an answer's optional parts a client wants to see."""

from dataclasses import dataclass

from frontend.api.models import ChatBody, CompletionBody, GenerationBody
from frontend.tool_choice import reads_calls


@dataclass(frozen=True)
class View:
    """`num_top`: likeliest tokens beside each token; None: no log-probabilities. `prompt_top`: of the prompt's.

    `reads_calls`: calls of tools are told apart from the text. `timing`: where the time went is told.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    num_top: int | None = None
    prompt_top: int | None = None
    reads_calls: bool = False
    timing: bool = False

    @classmethod
    def of(cls, body: GenerationBody, *, timing: bool = False) -> "View":
        """What `body` asks for, and a header."""
        options = body.stream_options
        return cls(
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            num_top=body.num_top,
            prompt_top=body.prompt_logprobs,
            reads_calls=isinstance(body, ChatBody) and reads_calls(body),
            timing=timing,
        )
