"""Errors of the package.

ReplayError
├── SettingInvalid      a setting is out of range; names the flag
├── ModelUnavailable    there is no such model folder, or the model cannot be downloaded
├── TokenizerUnusable   the model folder has no usable tokenizer
├── PromptPlanError     the trace cannot be turned into prompts with these settings
├── DatasetUnusable     a file of prompts cannot be read or has the wrong format
├── ServerUnusable      the server at --url does not answer or is unsuitable
│   ├── ServerUnreachable   no server answers at --url
│   └── TokenizerMismatch   the server's tokenizer differs from the local one
├── OutputUnwritable    the report's folder cannot be written
├── SenderUnusable      a sender process did not start
├── VerificationError   the answers cannot be re-scored (no token ids, another model, no engine model)
└── StreamFailed        an answer ended in an error or is malformed; becomes the reason in its RequestRecord
    └── MalformedStream the bytes are not an event stream
"""

from __future__ import annotations


class ReplayError(Exception):
    """Base class: a load test cannot start or continue."""


class SettingInvalid(ReplayError):
    """A setting is out of range; the message names the flag, the value and the expected values."""


class ModelUnavailable(ReplayError):
    """There is no such model folder, or the model cannot be downloaded; the message names the flag and the remedy."""


class TokenizerUnusable(ReplayError):
    """The model folder has no tokenizer, or an unusable one."""


class PromptPlanError(ReplayError):
    """The trace cannot be turned into prompts with these settings."""


class DatasetUnusable(ReplayError):
    """A dataset file cannot be read or has the wrong format; the message names the place and the expected format."""


class ServerUnusable(ReplayError):
    """The server does not answer or is unsuitable; the message names the URL and the response."""


class ServerUnreachable(ServerUnusable):
    """No server answers at the URL."""


class TokenizerMismatch(ServerUnusable):
    """The server's tokenizer differs from the local one; the message names both and the flag."""


class OutputUnwritable(ReplayError):
    """The report's folder cannot be created or written; the message names it."""


class SenderUnusable(ReplayError):
    """A sender process did not start; the message names it and how it ended."""


class VerificationError(ReplayError):
    """The answers cannot be re-scored."""


class StreamFailed(ReplayError):
    """An answer ended in an error or is malformed; the message is the reason."""


class MalformedStream(StreamFailed):
    """The bytes are not a server-sent event stream of an OpenAI-compatible server."""
