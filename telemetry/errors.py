"""Every error this package raises; nothing else lives here.

TelemetryError
└── UnknownLogLevel      a log level that is none of logging's names
"""


class TelemetryError(Exception):
    """Root of the package's errors."""


class UnknownLogLevel(TelemetryError, ValueError):
    """The level asked for is none of debug, info, warning, error, critical."""
