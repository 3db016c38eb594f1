"""Has this process's gRPC encrypted as its settings say: a role's own, `serve`'s, or those of a command that asks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.config import all_settings, load
from moonpool.config.sources import CONFIG_VARIABLE
from moonpool.config.transport import TlsSettings
from moonpool.errors import ConfigError
from moonpool.tether import SUPERVISOR_VARIABLE

_VARIABLES = ("MOONPOOL_TLS_", CONFIG_VARIABLE)


@dataclass(frozen=True)
class _Asking:
    """What a command reads that has no settings of its own."""

    tls: TlsSettings = field(default_factory=TlsSettings)


def secure(tls: TlsSettings) -> None:
    """Before the first server or channel is made. Raises ConfigError for files that are of no use."""
    files = tls.files
    if files is None:
        return
    from messenger import control
    from messenger.errors import InvalidArgument

    try:
        control.secure(files)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error


def secure_as_environment_says() -> None:
    """By MOONPOOL_TLS_*, and the file that MOONPOOL_CONFIG names. Raises ConfigError."""
    secure(settings_of_environment())


def settings_of_environment(environ: Mapping[str, str] = os.environ) -> TlsSettings:
    """Those of MOONPOOL_TLS_*, over those of the file that MOONPOOL_CONFIG names. Raises ConfigError."""
    if not any(name.startswith(_VARIABLES) for name in environ):
        return TlsSettings()
    reserved = (SUPERVISOR_VARIABLE,)
    return load(
        _Asking, flags={}, environ=environ, config_file=None, known=all_settings(), reserved_variables=reserved
    ).tls
