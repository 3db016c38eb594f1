"""Errors of the package simulator.

SimulatorError
└── BadSetting      a capacity, policy or setting that cannot be simulated
"""


class SimulatorError(Exception):
    """Any failure to simulate."""


class BadSetting(SimulatorError, ValueError):
    """What was asked for cannot be simulated; says what can."""
