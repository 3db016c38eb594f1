"""The result of a benchmark as JSON, with vLLM's keys, and the file it is saved to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.bench.config import BenchConfig
from loadtest.bench.figures import bench_figures, detailed
from loadtest.bench.runner import BenchResult
from loadtest.errors import OutputUnwritable, SettingInvalid
from loadtest.report import finite


@dataclass(frozen=True)
class Saving:
    """Where results go. `filename` empty: made of what was run, as vLLM does."""

    save: bool = False
    append: bool = False
    detailed: bool = False
    folder: Path = Path()
    filename: str = ""
    label: str = ""
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises SettingInvalid."""
        for pair in self.metadata:
            if "=" not in pair:
                raise SettingInvalid(f"--metadata is {pair!r}; expected KEY=VALUE")


def result_of(result: BenchResult, config: BenchConfig, saving: Saving, now: datetime) -> dict[str, Any]:
    """All keys of the result; those of single requests only if asked for."""
    tokenizer = config.tokenizer
    figures = bench_figures(
        result.records,
        metrics=config.percentile_metrics,
        percentiles=config.metric_percentiles,
        goodput_ms=config.goodput,
    )
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": saving.label or None,
        "model_id": result.model,
        "tokenizer_id": str(tokenizer) if tokenizer else None,
        "num_prompts": config.num_prompts,
        **{key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in saving.metadata)},
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": config.max_concurrency,
        "valid": not result.invalid_reasons,
        "invalid_reasons": list(result.invalid_reasons),
        "interrupted": result.interrupted,
        "senders": result.senders,
        **figures,
        **(detailed(result.records) if saving.detailed else {}),
    }


def save(figures: Mapping[str, Any], config: BenchConfig, saving: Saving) -> Path | None:
    """Write the result if it is to be kept; its path. Raises OutputUnwritable."""
    if not saving.save and not saving.append:
        return None
    path = saving.folder / (saving.filename or default_name(figures, config, saving))
    text = json.dumps(finite(dict(figures)), allow_nan=False, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if saving.append else "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OutputUnwritable(f"cannot write the result to {path}: {error}") from error
    return path


def default_name(figures: Mapping[str, Any], config: BenchConfig, saving: Saving) -> str:
    """vLLM's: label-RATEqps[-concurrencyN]-model-date.json; INVALID in front where it is."""
    invalid = "" if figures["valid"] else "INVALID-"
    limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency is not None else ""
    model = str(figures["model_id"]).rsplit("/", 1)[-1]
    rate = float(config.request_rate)
    return f"{invalid}{saving.label or config.backend}-{rate}qps{limit}-{model}-{figures['date']}.json"
