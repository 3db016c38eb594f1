"""Every error this package raises; nothing else lives here.

TelemetryError
├── BadTracing           variables of OpenTelemetry's that cannot be followed
└── UnknownLogLevel      a log level that is none of logging's names
"""


class TelemetryError(Exception):
    """Root of the package's errors."""


class UnknownLogLevel(TelemetryError, ValueError):
    """The level asked for is none of debug, info, warning, error, critical."""


class BadTracing(TelemetryError, ValueError):
    """OpenTelemetry's variables ask for what cannot be done, or make no sense."""
