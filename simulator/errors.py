"""Errors of the package simulator.

SimulatorError
└── BadSetting      a capacity, policy or setting that cannot be simulated
"""


class SimulatorError(Exception):
    """Base class of the package's errors."""


class BadSetting(SimulatorError, ValueError):
    """Invalid setting; the message names it and the accepted values."""
