"""Errors of the package telemetry.

TelemetryError
├── BadTracing           OpenTelemetry's environment variables are invalid or unsupported
└── UnknownLogLevel      unknown log level
"""


class TelemetryError(Exception):
    """Root of the package's errors."""


class UnknownLogLevel(TelemetryError, ValueError):
    """Unknown log level; expected debug, info, warning, error or critical."""


class BadTracing(TelemetryError, ValueError):
    """OpenTelemetry's environment variables are invalid or unsupported."""
