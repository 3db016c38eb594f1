"""Sets up TLS and join tokens for this process's gRPC: for roles, `serve`, and commands that call a cluster."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.config import all_settings, load
from moonpool.config.sources import CONFIG_VARIABLE
from moonpool.errors import ConfigError
from moonpool.supervision.child import INTERNAL_VARIABLES
from settings.messenger import AccessSettings, TlsSettings

_VARIABLES = ("MOONPOOL_TLS_", "MOONPOOL_JOIN_TOKEN_FILE", CONFIG_VARIABLE)


@dataclass(frozen=True)
class TransportSecurity:
    """TLS and access settings of a command that has no configuration of its own."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    access: AccessSettings = field(default_factory=AccessSettings)


def secure(tls: TlsSettings, access: AccessSettings) -> None:
    """Apply the settings; to be called before the first server or channel. Raises ConfigError for unusable files."""
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


def secure_from_environment() -> None:
    """Apply MOONPOOL_TLS_*, MOONPOOL_JOIN_TOKEN_FILE and the file in MOONPOOL_CONFIG. Raises ConfigError."""
    found = settings_of_environment()
    secure(found.tls, found.access)


def settings_of_environment(environ: Mapping[str, str] = os.environ) -> TransportSecurity:
    """Return the settings of these variables, which override the file in MOONPOOL_CONFIG. Raises ConfigError."""
    if not any(name.startswith(_VARIABLES) for name in environ):
        return TransportSecurity()
    return load(
        TransportSecurity,
        flags={},
        environ=environ,
        config_file=None,
        known=all_settings(),
        reserved_variables=INTERNAL_VARIABLES,
    )
