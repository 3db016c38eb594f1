"""Errors of the package.

ReplayError
├── SettingInvalid      a setting is out of range; names the flag
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
    """Any reason for which a replay cannot start or go on."""


class SettingInvalid(ReplayError):
    """A setting is out of its range: names the flag, the value and what was expected."""


class TokenizerUnusable(ReplayError):
    """The model folder has no tokenizer, or one that makes no tokens."""


class PromptPlanError(ReplayError):
    """The trace cannot be turned into prompts with these settings."""


class DatasetUnusable(ReplayError):
    """A file of prompts cannot be read or is not what it was called: names the place and what was expected."""


class ServerUnusable(ReplayError):
    """The server does not answer or is not what the replay needs: names the URL and what came back."""


class ServerUnreachable(ServerUnusable):
    """Nothing answers at the server's address."""


class TokenizerMismatch(ServerUnusable):
    """The server's tokens are not those of the tokenizer at hand: names both and the flag."""


class OutputUnwritable(ReplayError):
    """The report's folder cannot be made or written: names it."""


class SenderUnusable(ReplayError):
    """A sending process did not come up: names it and how it ended."""


class VerificationError(ReplayError):
    """The answers cannot be re-scored."""


class StreamFailed(ReplayError):
    """One answer ended in an error or not as it should; the text is the reason."""


class MalformedStream(StreamFailed):
    """The bytes are not an event stream as OpenAI-compatible servers send it."""
