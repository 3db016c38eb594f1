"""Replay of request traces against a live server: open-loop load, verification of the answers, reports."""

from loadtest.config import ReplayConfig
from loadtest.errors import (
    OutputUnwritable,
    PromptPlanError,
    ReplayError,
    ServerUnusable,
    SettingInvalid,
    TokenizerUnusable,
    VerificationError,
)
from loadtest.report import Report
from loadtest.runner import run

__all__ = [
    "OutputUnwritable",
    "PromptPlanError",
    "ReplayConfig",
    "ReplayError",
    "Report",
    "ServerUnusable",
    "SettingInvalid",
    "TokenizerUnusable",
    "VerificationError",
    "run",
]
