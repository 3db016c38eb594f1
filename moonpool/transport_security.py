"""Has this process's gRPC encrypted, and closed to strangers, as settings say: a role's, `serve`'s, or a command's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.config import all_settings, load
from moonpool.config.sources import CONFIG_VARIABLE
from moonpool.errors import ConfigError
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from settings.messenger import AccessSettings, TlsSettings

_VARIABLES = ("MOONPOOL_TLS_", "MOONPOOL_JOIN_TOKEN_FILE", CONFIG_VARIABLE)


@dataclass(frozen=True)
class Asking:
    """What a command reads that has no settings of its own."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    access: AccessSettings = field(default_factory=AccessSettings)


def secure(tls: TlsSettings, access: AccessSettings) -> None:
    """Before the first server or channel is made. Raises ConfigError for files that are of no use."""
    token_file = access.join_token_file
    if tls.tls_cert is None and token_file is None:
        return
    from rpc import control
    from rpc.errors import InvalidArgument
    from rpc.join_tokens import JoinTokens
    from rpc.tls import TlsFiles

    try:
        if tls.tls_cert is not None:
            control.secure(TlsFiles.of(tls))
        if token_file is not None:
            control.admit_by(JoinTokens(token_file))
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error


def secure_as_environment_says() -> None:
    """By MOONPOOL_TLS_*, MOONPOOL_JOIN_TOKEN_FILE, and the file that MOONPOOL_CONFIG names. Raises ConfigError."""
    said = settings_of_environment()
    secure(said.tls, said.access)


def settings_of_environment(environ: Mapping[str, str] = os.environ) -> Asking:
    """Those of these variables, over those of the file that MOONPOOL_CONFIG names. Raises ConfigError."""
    if not any(name.startswith(_VARIABLES) for name in environ):
        return Asking()
    reserved = (SUPERVISOR_VARIABLE,)
    return load(Asking, flags={}, environ=environ, config_file=None, known=all_settings(), reserved_variables=reserved)
