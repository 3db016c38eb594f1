"""Replays request traces against a live server: open-loop load, verification of the answers, reports."""

from replay.config import ReplayConfig
from replay.errors import (
    OutputUnwritable,
    PromptPlanError,
    ReplayError,
    ServerUnusable,
    SettingInvalid,
    TokenizerUnusable,
    VerificationError,
)
from replay.report import Report
from replay.runner import run

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
