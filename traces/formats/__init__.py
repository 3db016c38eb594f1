"""Formats of published traces, each in its own file, and how a file's format is detected."""

from traces.formats.aiperf import AiPerfFormat
from traces.formats.azure import AzureFormat
from traces.formats.bailian import BailianFormat
from traces.formats.base import Encode, SourceSettings, TraceFormat, encode_bytes
from traces.formats.burstgpt import BurstGptFormat
from traces.formats.detection import detect_format
from traces.formats.mooncake import MooncakeFormat
from traces.formats.sharegpt import ShareGptFormat
from traces.formats.weka import WekaFormat

FORMATS: dict[str, type[TraceFormat]] = {
    each.name: each
    for each in (AzureFormat, BurstGptFormat, BailianFormat, ShareGptFormat, AiPerfFormat, WekaFormat, MooncakeFormat)
}

__all__ = ["FORMATS", "Encode", "SourceSettings", "TraceFormat", "detect_format", "encode_bytes"]
