"""Reuse of a sibling's KV (DroidSpeak): quality against prefill time, on questions that the reuse profile never saw.

    python -m benchmarks.droidspeak [--receiver FOLDER] [--profile-contexts N] [--test-contexts N] [--trials N]
                                    [--store]

The sender is the bundled model, the receiver its fine-tune in tests/data/reports-model, whose task the sender fails. A
reuse profile is made as by `moonpool droidspeak profile`; then other questions, about other names, are answered with
the groups of layers of four curves (Liu et al. 2024, §4):

    KV suffix     the first layers are computed from the tokens, the KV of the others is reused
    E only        the last layers are computed from hidden states, the KV of the first ones is projected from theirs
    E + KV        the last layers are computed from hidden states, the KV of the first ones is reused
    contiguous    a group anywhere is computed, the KV before and behind it is reused: the groups that were best on
                  the profile's questions

Prefill times are TTFTs of the receiver on a live cluster (`droidspeak_live.py`), of contexts whose KV the sender has
stored on another host (it comes over TCP), and of contexts that nobody has seen: the median of all clusters. Clusters
do not serve `E only`: its time is the TTFT without reuse, less the engine's time for a whole prefill, plus that for its
part; its transfers are not counted. Intervals are of 95 %, from resampled contexts.

The last line of output is JSON. `prefill_speedup` and `quality_loss` are those of the cheapest group of the profile
with a loss of at most 2 % on the profile's questions (without one, of the best), measured on the test's questions.
`receiver_projection_ms`: hidden states to keys and values in the first layer of that group. `sender_extra_bytes`: room
for hidden states at the sender's workers, in host memory, with that group; `sender_extra_bytes_of_states`: with a group
that needs some. `cascade`: the second agent's TTFT with and without reuse, and `bandwidth_saved`, the part of its
prompt's KV that it did not have to load. `--store` writes benchmarks/results/droidspeak-DATE.json and
docs/pictures/droidspeak.svg.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from benchmarks.droidspeak_live import LiveContext, cascade, prefill_times
from benchmarks.frontend.processes import BUNDLED
from benchmarks.stored import PICTURES, store
from engine import LayerSpan
from moonpool.droidspeak.examples import Examples, SharedContext
from moonpool.droidspeak.frontier import frontier_of, points_of
from moonpool.droidspeak.measuring import BLOCK_TOKENS, ContextCache, measure
from moonpool.droidspeak.pair import ModelPair
from moonpool.profiling.measurement import progress_bar
from moonpool.profiling.picture import GRID, MUTED, STYLE, save_picture
from tools.training.report_questions import write_questions
from worker.policy.reuse_profile import ReusePoint, ReuseProfile
from worker.slot_memory import spec_of

RECEIVER = Path(__file__).resolve().parents[1] / "tests" / "data" / "reports-model"
MOST_LOSS: Final = 0.02
TIMED_COST: Final = 0.85
"""Of a whole prefill's work; conductors do not reuse where less would be gained."""
REPEATS: Final = 7
COLOURS: Final = {"KV suffix": "#8250df", "E only": "#bf8700", "E + KV": "#1a7f37", "contiguous": "#0969da"}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as name:
        result = run(Path(name), args)
    show(result)
    if args.store:
        store("droidspeak", result)
        draw(result, PICTURES / "droidspeak.svg")
    print(json.dumps(result, allow_nan=False))


def run(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures; `work` is an empty folder."""
    pair = ModelPair.load(BUNDLED, args.receiver, "cpu", {"threads": args.threads})
    config = pair.receiver.config
    for split, contexts in (("profile", args.profile_contexts), ("test", args.test_contexts)):
        write_questions(work / f"{split}.jsonl", split, contexts=contexts, questions=args.questions, tokens=args.tokens)
    profile, points = pair.profile(work / "profile.jsonl", ("base", "reports"), (args.max_quality_loss, 1.0))
    examples, curves = pair.examples(work / "test.jsonl"), curves_of(points, config.num_layers)
    served = {span for name, spans in curves.items() if name != "E only" for span in spans}
    with _counting("contexts of the test", examples) as done:
        answers = measure(pair.sender, pair.receiver, examples, done, served)
    with _counting("the same, E only", examples) as done:
        projected = replace(answers, groups=answer_e_only(pair, examples, curves["E only"], done))
    tested = {
        name: {LayerSpan(p.first, p.last): p for p in points_of(each, config, examples.mean_context_tokens)}
        for name, each in (("served", answers), ("E only", projected))
    }
    one_thread = ModelPair.load(BUNDLED, args.receiver, "cpu", {"threads": 1})  # as the workers'
    engine = EngineTimes(one_thread, examples.contexts[0])
    live = {
        span: prefill_times(
            args.receiver,
            profile_of_one(profile, tested["served"][span]),
            work / f"{span.first} to {span.last}",
            live_contexts(examples),
            args.trials,
        )
        for span in _progress("clusters", [s for s in served if tested["served"][s].cost <= TIMED_COST])
    }
    alone_s = median(times["alone_s"] for times in live.values())
    e_only_s = {span: alone_s - engine.whole_s + engine.e_only_s(span) for span in curves["E only"]}
    times_s = {span: times["reused_s"] for span, times in live.items()}
    chosen = chosen_of(profile)
    there = tested["served"][chosen]
    right = {name: float(getattr(answers, name).mean()) for name in ("sender", "receiver", "all_reused")}
    agents = cascade(
        args.receiver, profile_of_one(profile, there), work / "cascade", joined(live_contexts(examples)), args.trials
    )
    kv_bytes = spec_of(pair.receiver.kv_groups, BLOCK_TOKENS).bytes_per_token
    whole_nbytes = kv_bytes * agents["reused_share"] * agents["prompt_tokens"]
    return {
        "profile": {
            "questions": profile.questions,
            "contexts": profile.contexts,
            "points": [asdict(point) for point in profile.points],
            "accuracy": asdict(profile.accuracy),
        },
        "test": {
            "questions": examples.num_questions,
            "contexts": len(examples.contexts),
            "context_tokens": examples.mean_context_tokens,
            "accuracy": right,
            "all_reused_loss": (right["receiver"] - right["all_reused"]) / (right["receiver"] - right["sender"]),
        },
        "curves": {
            name: [
                asdict(tested["E only" if name == "E only" else "served"][span])
                | {"prefill_s": (e_only_s if name == "E only" else times_s).get(span)}
                for span in spans
            ]
            for name, spans in curves.items()
        },
        "alone_s": alone_s,
        "live": {f"{span.first} to {span.last}": times for span, times in live.items()},
        "chosen": [chosen.first, chosen.last],
        "prefill_speedup": alone_s / live[chosen]["reused_s"],
        "quality_loss": there.quality_loss,
        "quality_loss_interval": there.loss_interval,
        "receiver_projection_ms": 1e3 * engine.projection_s(chosen.first),
        "sender_extra_bytes": live[chosen]["sender_extra_bytes"],
        "sender_extra_bytes_of_states": max(times["sender_extra_bytes"] for times in live.values()),
        "sender_kv_bytes": live[chosen]["sender_kv_bytes"],
        "cascade": agents | {"bandwidth_saved": 1 - agents["loaded_bytes"] / whole_nbytes},
    }


def curves_of(points: list[ReusePoint], num_layers: int) -> dict[str, list[LayerSpan]]:
    """Return the groups of each curve, for the last of them those that were best on the profile's questions."""
    last = num_layers - 1
    suffixes = [LayerSpan(first, last) for first in range(1, num_layers)]
    return {
        "KV suffix": [LayerSpan(0, end) for end in range(last)],
        "E only": suffixes,
        "E + KV": suffixes,
        "contiguous": [LayerSpan(point.first, point.last) for point in frontier_of(points, inf, 1.0)],
    }


def chosen_of(profile: ReuseProfile) -> LayerSpan:
    """Return the cheapest group that loses at most `MOST_LOSS` on the profile's questions, otherwise the best one."""
    best = profile.points[-1]
    point = next((point for point in profile.points if point.quality_loss <= MOST_LOSS), best)
    return LayerSpan(point.first, point.last)


def profile_of_one(profile: ReuseProfile, point: ReusePoint) -> ReuseProfile:
    """Return a profile with this point alone, whatever it loses."""
    bounded = replace(point, quality_loss=min(point.quality_loss, 1.0))
    return replace(profile, points=(bounded,), max_quality_loss=1.0)


def answer_e_only(
    pair: ModelPair, examples: Examples, spans: Sequence[LayerSpan], progress: Callable[[int], None]
) -> dict[LayerSpan, npt.NDArray[np.bool_]]:
    """Return which questions are answered exactly if the KV before each span is projected from hidden states."""
    num_layers = pair.receiver.config.num_layers
    found: dict[LayerSpan, list[npt.NDArray[np.bool_]]] = {span: [] for span in spans}
    for done, context in enumerate(examples.contexts, 1):
        sent, projected, mixed, computed = (
            ContextCache(model, context) for model in (pair.sender, *[pair.receiver] * 3)
        )
        inputs = sent.prefill(frozenset(range(1, num_layers)))
        for layer in range(num_layers):
            projected.recompute(LayerSpan(layer, layer), inputs.get(layer))
        for span in spans:
            computed.recompute(span, inputs[span.first])
            mixed.take(projected, range(span.first))
            mixed.take(computed, range(span.first, num_layers))
            found[span].append(mixed.answers())
        progress(done)
    return {span: np.concatenate(each) for span, each in found.items()}


class EngineTimes:
    """Times of parts of a prefill in this process: the median of `REPEATS`, in seconds."""

    def __init__(self, pair: ModelPair, context: SharedContext) -> None:
        self._cache = ContextCache(pair.receiver, context)
        layers = frozenset(range(1, pair.receiver.config.num_layers))
        self._inputs = ContextCache(pair.sender, context).prefill(layers)
        self.whole_s = self._median_s(self._cache.prefill)

    def projection_s(self, layer: int) -> float:
        """Return the time from hidden states to the layer's keys and values."""
        return self._median_s(lambda: self._cache.recompute(LayerSpan(layer, layer), self._inputs.get(layer)))

    def e_only_s(self, span: LayerSpan) -> float:
        """Return the time of the projections before the span and of the span."""
        before_s = sum(self.projection_s(layer) for layer in range(span.first))
        return before_s + self._median_s(lambda: self._cache.recompute(span, self._inputs[span.first]))

    def _median_s(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return median(times)


def live_contexts(examples: Examples) -> list[LiveContext]:
    """Return the contexts with the first question about each."""
    return [LiveContext(each.ids.tolist(), each.questions[0].question.tolist()) for each in examples.contexts]


def joined(contexts: list[LiveContext]) -> list[LiveContext]:
    """Return each context behind the one before it, with its question: twice the length."""
    return [LiveContext(a.ids + b.ids[1:], b.question) for a, b in pairwise(contexts)]


def _counting(what: str, examples: Examples) -> AbstractContextManager[Callable[[int], None]]:
    return progress_bar(Console(stderr=True), what, "contexts", len(examples.contexts))


def _progress(what: str, spans: Collection[LayerSpan]) -> Iterator[LayerSpan]:
    with progress_bar(Console(stderr=True), what, what, len(spans)) as done:
        for number, span in enumerate(sorted(spans, key=lambda span: (span.first, span.last)), 1):
            yield span
            done(number)


def show(result: dict[str, Any]) -> None:
    """Print the curves, and the figures of the chosen group."""
    test, console = result["test"], Console(file=sys.stderr, width=120)
    table = Table(title=f"{test['questions']:,} questions about contexts of {test['context_tokens']:,.0f} tokens")
    for heading in ("curve", "layers computed", "exact answers", "quality loss", "95 % interval", "TTFT", "speed-up"):
        table.add_column(heading)
    for name, rows in result["curves"].items():
        for row in rows:
            low, high = row["loss_interval"]
            taken = row["prefill_s"]
            times = ("", "") if taken is None else (f"{1e3 * taken:.0f} ms", f"{result['alone_s'] / taken:.2f}")
            shares = (f"{row['accuracy']:.1%}", f"{row['quality_loss']:.1%}", f"{low:.1%} to {high:.1%}")
            table.add_row(name, f"{row['first']} to {row['last']}", *shares, *times)
    console.print(table)
    accuracy, again = test["accuracy"], result["cascade"]
    console.print(
        f"base {accuracy['sender']:.1%}, fine-tune {accuracy['receiver']:.1%}, with all KV of the base "
        f"{accuracy['all_reused']:.1%}; layers {result['chosen'][0]} to {result['chosen'][1]}: "
        f"{result['prefill_speedup']:.2f} times as fast, loss {result['quality_loss']:.1%}; second agent "
        f"{1e3 * again['second_ttft_s']:.0f} ms, without reuse {1e3 * again['second_ttft_alone_s']:.0f} ms"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw quality loss against TTFT, a line for each curve."""
    with mpl.rc_context(STYLE | {"svg.hashsalt": "droidspeak"}):
        figure = Figure(figsize=(8.4, 5.0), layout="constrained")
        axes = figure.subplots()
        for name, colour in COLOURS.items():
            rows = [row for row in result["curves"][name] if row["prefill_s"] is not None]
            rows.sort(key=lambda row: row["prefill_s"])
            losses = np.array([row["quality_loss"] for row in rows])
            bars = np.abs(np.array([row["loss_interval"] for row in rows]).T - losses)
            times_ms = [1e3 * row["prefill_s"] for row in rows]
            axes.errorbar(
                times_ms, losses, bars, fmt="o-", markersize=4, capsize=2, linewidth=1.2, color=colour, label=name
            )
        axes.axvline(1e3 * result["alone_s"], color=MUTED, linestyle="--", linewidth=1.0)
        axes.text(1e3 * result["alone_s"], 0.5, " no reuse", color=MUTED, fontsize=9)
        axes.axhline(MOST_LOSS, color=MUTED, linestyle=":", linewidth=1.0)
        axes.axhline(result["test"]["all_reused_loss"], color=MUTED, linestyle="--", linewidth=1.0)
        axes.text(0, result["test"]["all_reused_loss"], " all KV reused", color=MUTED, fontsize=9, va="bottom")
        axes.set_xlim(0, None)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("time to first token, ms")
        axes.set_ylabel("part of the fine-tune's lead that is lost")
        axes.grid(True, color=GRID, linewidth=0.6)
        axes.legend(frameon=False)
        axes.set_title("Reuse of the base's KV by its fine-tune", loc="left", fontsize=11)
        save_picture(figure, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receiver", type=Path, default=RECEIVER, help="model folder")
    parser.add_argument("--profile-contexts", type=int, default=12, help="contexts of the profile")
    parser.add_argument("--test-contexts", type=int, default=100, help="contexts of the test")
    parser.add_argument("--questions", type=int, default=30, help="about each context")
    parser.add_argument("--tokens", type=int, default=1536, help="of each context")
    parser.add_argument("--max-quality-loss", type=float, default=0.05, help="of the profile")
    parser.add_argument("--trials", type=int, default=9, help="requests of each kind to each cluster")
    parser.add_argument("--threads", type=int, default=2, help="that answer the questions")
    parser.add_argument("--store", action="store_true", help="store the result and its picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
