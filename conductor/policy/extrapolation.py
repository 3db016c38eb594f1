"""Which of a decision's predictions lie beyond what was measured. They are lengthened where they are made."""

from conductor.policy.algorithm1 import PrefillScores, Prefixes
from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decode_choice import DecodeChoice
from conductor.policy.nodes import ModelNodes

__all__ = ["extrapolated"]


def extrapolated(
    prefixes: Prefixes,
    scores: PrefillScores,
    choice: DecodeChoice | None,
    prompt_tokens: int,
    model: ModelNodes,
    costs: ModelCosts,
    transfers: TransferCosts,
) -> tuple[str, ...]:
    """Of "prefill", "decode", "load", "fetch" and "ssd_read", for the candidates chosen."""
    chosen, block_nbytes, found = scores.chosen, model.block_nbytes, []
    reuse = scores.reuse_blocks.item(chosen)
    if not costs.covers_prefill(prompt_tokens - reuse * model.block_tokens, prompt_tokens):
        found.append("prefill")
    if choice is not None and not choice.is_covered:
        found.append("decode")
    if reuse:
        own = prefixes.held.item(0, chosen)
        missing = reuse - own
        on_ssd = prefixes.held.item(1, chosen) + min(missing, prefixes.best_ssd)
        if own and not transfers.covers("load", own * block_nbytes):
            found.append("load")
        if missing and not transfers.covers("fetch", missing * block_nbytes):
            found.append("fetch")
        if on_ssd and not transfers.covers("ssd_read", on_ssd * block_nbytes):
            found.append("ssd_read")
    return tuple(found)
