"""The frontend (API server): OpenAI's API, tokenising, streaming, API keys and quotas, the console.

A request's path from HTTP to its tokens, in order:

1. `http/shared_listener.py`, `acceptor.py`, `connections.py`: accept the connection, parse HTTP within limits.
2. `api/app.py`: route; `api_keys.py`, `callers.py`: authenticate, check the quota.
3. `api/body.py`, `api/request_models.py`: read and validate the body; `api/messages/` and `api/responses/`: other APIs,
   whose bodies become chats.
4. `prepare.py` (with `prompts.py`, `chat_rendering.py`, `tokenizer.py`, `grammars.py`, `endless.py`): make
   GenerationRequests (`request.py`).
5. `api/generate.py`: open a session (`service.py`) and run it.
6. `generation.py`: for each attempt, place it (`attempts.py`, `conductor.py`), submit it and receive its tokens
   (`worker_streams.py`).
7. `output.py`: tokens to text, stop strings, log-probabilities, reasoning (`reasoning/`).
8. `api/formatter.py`, `api/formats.py` (with `tool_formats/`), `api/stream.py`: encode the response, whole or as
   server-sent events.
9. `request_reports.py`: metrics, log and trace at the end; `next_turn.py`: the next prompt in advance, if asked for.

`answer_format.py` selects the formats of a model's reasoning and tool calls when the frontend starts.
`server.py` starts and stops the frontend; `cluster.py` polls the cluster's state; `console/` is the operators' page,
and `admin.py` forwards calls of their commands.
"""

from frontend.config import FrontendConfig, ServedModelConfig
from frontend.errors import FrontendConfigError, FrontendError, HttpPortInUse, ModelFilesError
from frontend.http.shared_listener import SharedListener
from frontend.server import serve_frontend

__all__ = [
    "FrontendConfig",
    "FrontendConfigError",
    "FrontendError",
    "HttpPortInUse",
    "ModelFilesError",
    "ServedModelConfig",
    "SharedListener",
    "serve_frontend",
]
