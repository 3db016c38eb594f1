"""A sender and a receiver, and the reuse profile that is measured for them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moonpool.errors import ConfigError
from moonpool.profiling.measurement import progress_bar
from worker.policy.reuse_profile import ReuseAccuracy, ReusePoint, ReuseProfile

if TYPE_CHECKING:
    from engine import Model
    from frontend.tokenizer import Tokenizer
    from moonpool.droidspeak.examples import Examples


class ModelPair:
    """Two models that may share KV, as far as their configurations tell."""

    def __init__(self, sender: Model, receiver: Model, tokenizer: Tokenizer) -> None:
        self.sender, self.receiver, self._tokenizer = sender, receiver, tokenizer

    @classmethod
    def load(cls, sender: Path, receiver: Path, device: str, options: Mapping[str, Any]) -> ModelPair:
        """Load both models; `options` are those of `engine.load_model`.

        Raises ConfigError if they cannot be loaded, or cannot share KV.
        """
        from engine import EngineError, load_model
        from frontend.errors import FrontendError
        from frontend.tokenizer import Tokenizer
        from moonpool.role_configs import choose_device

        try:
            tokenizers = [Tokenizer(folder) for folder in (sender, receiver)]
            models = [load_model(folder, device=choose_device(device, 0), **options) for folder in (sender, receiver)]
        except (EngineError, FrontendError) as error:
            raise ConfigError(f"a model cannot be loaded: {error}") from error
        if tokenizers[0].identity != tokenizers[1].identity:
            raise ConfigError(f"tokenizer.json of {sender} and {receiver} differ: models share KV only of equal tokens")
        first, second = (model.config for model in models)
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "layer_windows", "ropes"):
            if getattr(first, name) != getattr(second, name):
                raise ConfigError(
                    f"{name} of {sender} is {getattr(first, name)}, of {receiver} {getattr(second, name)}: "
                    "only models of one shape share KV"
                )
        if models[0].kv_groups != models[1].kv_groups:
            raise ConfigError(f"the KV of {sender} and {receiver} differs in dtype or layout: use one --dtype for both")
        if models[0].fingerprint == models[1].fingerprint:
            raise ConfigError(f"{sender} and {receiver} are the same model, which reuses its own KV without a profile")
        if len(second.kv_layers) < second.num_layers:
            raise ConfigError(f"layers of {receiver} share KV: groups can be computed only if each layer has its own")
        return cls(models[0], models[1], tokenizers[1])

    def examples(self, data: Path) -> Examples:
        """Read a file of examples. Raises ConfigError."""
        from moonpool.droidspeak.examples import read_examples

        return read_examples(data, self._tokenizer, self.receiver.config.max_positions)

    def profile(
        self, data: Path, names: tuple[str, str], bounds: tuple[float, float]
    ) -> tuple[ReuseProfile, list[ReusePoint]]:
        """Measure; return the profile and the points of all groups. Raises ConfigError if no group is good enough."""
        from moonpool.droidspeak.frontier import LEAST_LEAD, frontier_of, points_of
        from moonpool.droidspeak.measuring import measure

        config, (max_quality_loss, max_cost) = self.receiver.config, bounds
        examples = self.examples(data)
        with progress_bar(Console(stderr=True), "contexts", "contexts", len(examples.contexts)) as done:
            answers = measure(self.sender, self.receiver, examples, done)
        accuracy = ReuseAccuracy(
            *(float(right.mean()) for right in (answers.sender, answers.receiver, answers.all_reused))
        )
        if accuracy.receiver - accuracy.sender < LEAST_LEAD:
            raise ConfigError(
                f"{data}: {names[1]} answers {accuracy.receiver:.1%} exactly and {names[0]} {accuracy.sender:.1%}, too "
                "close to measure what reuse loses: use questions of the task that the receiver was tuned for"
            )
        points = points_of(answers, config, examples.mean_context_tokens)
        kept = frontier_of(points, max_quality_loss, max_cost)
        if not kept:
            best = min((p for p in points if p.cost <= max_cost), key=lambda p: p.quality_loss, default=None)
            found = (
                f"{best.first}..{best.last} loses least, {best.quality_loss:.1%}" if best else "all groups cost more"
            )
            raise ConfigError(
                f"no group of layers costs at most {max_cost:.0%} of a prefill and loses at most "
                f"{max_quality_loss:.1%} of {names[1]}'s lead: {found}. {names[0]} is no "
                "sibling whose KV can be reused, or --max-cost or --max-quality-loss is too strict"
            )
        made = ReuseProfile(
            sender=names[0],
            sender_fingerprint=self.sender.fingerprint,
            receiver=names[1],
            receiver_fingerprint=self.receiver.fingerprint,
            tokenizer=self._tokenizer.identity,
            dtype=self.receiver.dtype,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            made=datetime.now(UTC).date().isoformat(),
            data_sha256=examples.sha256,
            contexts=len(examples.contexts),
            questions=examples.num_questions,
            context_tokens=examples.mean_context_tokens,
            accuracy=accuracy,
            max_quality_loss=max_quality_loss,
            points=tuple(kept),
        )
        return made, points
