"""Comparison of lm-eval's local-completions on custom tasks with the same model in this process.

Its log-likelihoods come from prompts echoed with log-probabilities; ours from one dense forward pass per text, without
cluster and cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.clients.comparison import Allowed, Comparison, Row
from benchmarks.clients.context import Context, run_tool
from benchmarks.clients.environments import Environment
from benchmarks.clients.errors import ToolFailed
from benchmarks.clients.fact_questions import FactQuestion, write_questions
from benchmarks.clients.served import read_served
from engine import Model, load_model

QUESTIONS = 40
TASKS = ("moonpool_facts_choice", "moonpool_facts_generate")
TASK_FOLDER = Path(__file__).parent / "tasks"
_MODEL = "Model.score, one process"
_METRICS = "/metrics, same run"


def run_lm_eval(context: Context, environment: Environment) -> list[Row]:
    """Run both tasks and compare the results. Raises ToolFailed, ToolMissing."""
    context.work.mkdir(parents=True, exist_ok=True)
    questions = write_questions(context.work / "facts.jsonl", QUESTIONS)
    before = read_served(context.url)
    results, samples = _evaluate(context, environment)
    served = read_served(context.url) - before
    judge = Judge(load_model(context.model, threads=1), Tokenizer.from_file(str(context.model / "tokenizer.json")))
    ours = np.array([[judge.log_likelihood(q.context, choice) for choice in q.choices] for q in questions])
    theirs = _log_likelihoods(samples[TASKS[0]], questions)
    accuracy = float(np.mean(ours.argmax(axis=1) == [q.answer for q in questions]))
    exact = float(np.mean([judge.says(q.context, q.choices[q.answer]) for q in questions]))

    def row(name: str, figure: float | None, our: float, source: str = _MODEL, **allowed: float) -> Comparison:
        return Comparison("lm-eval", name, figure, our, source, "", Allowed(**allowed))

    return [
        row("log-likelihood, mean of all choices", float(theirs.mean()), float(ours.mean()), slack=1e-3),
        row("log-likelihood, furthest apart", float(np.abs(theirs - ours).max()), 0.0, slack=2e-3),
        row("is the greedy continuation, choices", _num_greedy(samples[TASKS[0]]),
            float(sum(judge.says(q.context, choice) for q in questions for choice in q.choices))),
        row("acc, multiple choice", _metric(results, TASKS[0], "acc"), accuracy),
        row("exact_match, generated", _metric(results, TASKS[1], "exact_match"), exact),
        row("requests", float(ours.size + len(questions)), served.completed, _METRICS),
        row("failed requests", 0.0, served.failed, _METRICS),
    ]  # fmt: skip


class Judge:
    """Reference model in this process."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer

    def log_likelihood(self, context: str, continuation: str) -> float:
        """Return the log-probability of the continuation after the context, in nats."""
        scores, tokens = self._scores(context, continuation)
        highest = scores.max(axis=1, keepdims=True)
        normed = scores - highest - np.log(np.exp(scores - highest).sum(axis=1, keepdims=True))
        return float(normed[np.arange(len(tokens)), tokens].sum())

    def says(self, context: str, continuation: str) -> bool:
        """Return True if greedy decoding produces the continuation."""
        scores, tokens = self._scores(context, continuation)
        return bool((scores.argmax(axis=1) == tokens).all())

    def _scores(self, context: str, continuation: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the float64 logits [n, vocab] for the n tokens of the continuation, and these tokens."""
        start = len(self._tokenizer.encode(context).ids)
        ids = np.array(self._tokenizer.encode(context + continuation).ids, np.int32)
        return self._model.score(ids)[start - 1 : -1].astype(np.float64), ids[start:]


def _evaluate(context: Context, environment: Environment) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    out, tasks = context.work / "results", context.work / "tasks"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(TASK_FOLDER, tasks, dirs_exist_ok=True)
    model = {
        "model": context.name,
        "base_url": f"{context.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": context.model,
        "tokenized_requests": True,
        "add_bos_token": True,
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 2048,
    }
    flags = {
        "model": "local-completions",
        "model_args": ",".join(f"{name}={value}" for name, value in model.items()),
        "tasks": ",".join(TASKS),
        "include_path": str(tasks),
        "batch_size": "4",
        "output_path": str(out),
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", value)]
    log = run_tool(context, environment, "run", *pairs, "--log_samples")
    reports, written = (
        sorted(out.rglob("results_*.json")),
        {task: sorted(out.rglob(f"samples_{task}_*.jsonl")) for task in TASKS},
    )
    if not reports or not all(written.values()):
        raise ToolFailed(f"lm-eval wrote no results under {out}; see {log}")
    results: dict[str, Any] = json.loads(reports[-1].read_text(encoding="utf-8"))["results"]
    samples = {
        task: [json.loads(line) for line in paths[-1].read_text(encoding="utf-8").splitlines()]
        for task, paths in written.items()
    }
    return results, samples


def _log_likelihoods(samples: Sequence[dict[str, Any]], questions: Sequence[FactQuestion]) -> np.ndarray[Any, Any]:
    """Return log-likelihoods [questions, choices] in the questions' order. Raises ToolFailed for other questions."""
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    if [sample["doc"]["context"] for sample in ordered] != [question.context for question in questions]:
        raise ToolFailed(f"lm-eval's samples are not the {len(questions)} questions that were written")
    return np.array([[float(answer[0][0]) for answer in sample["resps"]] for sample in ordered])


def _num_greedy(samples: Sequence[dict[str, Any]]) -> float:
    return float(sum(str(answer[0][1]) == "True" for sample in samples for answer in sample["resps"]))


def _metric(results: dict[str, Any], task: str, name: str) -> float | None:
    value = results.get(task, {}).get(f"{name},none")
    return None if value is None else float(value)
