"""What a request is charged: predicted when it is placed, put right when it has ended. Pure.

The unit is a second of a worker's time:

- an uncached prompt token: its share of the prefill, as the cost model has it;
- a generated token: its share of a step of the fullest batch that the decode node runs, so that the price does not
  depend on who else happens to be there;
- a block of KV held for a second: its share of the decode node's memory.

What a lost worker had computed is charged to nobody.
"""

from dataclasses import dataclass

from conductor.policy.fairness import Account, Shares, Usage
from worker.policy.cost_formulas import prefill_s, tbt_s

__all__ = ["Charge", "Prices"]

NS = 1_000_000_000
_UNKNOWN = -1


@dataclass(slots=True)
class Prices:
    """Of one model on one pair of nodes. `num_blocks` 0: the request decodes nowhere."""

    prefill: tuple[float, float, float]  # coefficients, as are the next
    decode: tuple[float, float, float]
    step_s: float  # of the batch that there usually is
    max_batch: int
    num_blocks: int  # of KV on the decode node

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Of a prompt of which so much was computed already."""
        return prefill_s(*self.prefill, prompt_tokens, min(reused_tokens, prompt_tokens))

    def decode_s(self, generated_tokens: float, context_tokens: float, kv_block_s: float) -> float:
        """Of tokens generated after so long a context, and of the blocks held meanwhile."""
        if not self.num_blocks:
            return 0.0
        batch = self.max_batch
        step_s = tbt_s(*self.decode, batch, batch * context_tokens, batch)
        return generated_tokens * step_s / batch + kv_block_s / self.num_blocks


@dataclass(slots=True)
class Charge:
    """One attempt's. `prompt_tokens` are those of the client; the attempt's prompt has `generated` more."""

    shares: Shares
    account: Account
    prices: Prices
    prompt_tokens: int
    reused_tokens: int
    generated: int
    num_blocks: int  # committed where it decodes
    is_endless: bool
    charged_ns: int = 0
    weight: float = 1.0  # by which it was charged
    held_since_ns: int = _UNKNOWN  # when the decode node's blocks were taken
    is_over: bool = False

    def open(self, ticket_ns: int, max_new_tokens: int) -> None:
        """Charge what is expected: the answer is about as long as the tenant's usually are."""
        usual = self.account.usual_tokens
        tokens = 0.0 if self.is_endless else max_new_tokens if usual is None else min(usual, max_new_tokens)
        held_s = self.num_blocks * tokens * self.prices.step_s
        self.charged_ns = self._cost_ns(self.reused_tokens, tokens, held_s)
        self.weight = self.shares.charge(self.account, ticket_ns, self.charged_ns)

    def begin(self, now_ns: int) -> None:
        """Its prefill begins: the decode node has taken the blocks."""
        if self.held_since_ns == _UNKNOWN:
            self.held_since_ns = now_ns

    def accrue(self, now_ns: int) -> None:
        """Of an endless request: what it has taken until now, since it may never end."""
        held_s = self._held_s(now_ns)
        self._put_right(self._cost_ns(self.reused_tokens, held_s / self.prices.step_s, self.num_blocks * held_s))

    def close(self, now_ns: int, *, generated: int, cached_tokens: int | None, is_lost: bool) -> None:
        """It is over: `generated` tokens over all attempts, `cached_tokens` of the prompt not computed (None: as was
        predicted). `is_lost`: the attempt was, with what it had computed. Does nothing the second time."""
        if self.is_over:
            return
        self.is_over = True
        tokens = max(0, generated - self.generated)
        reused = self.reused_tokens if cached_tokens is None else cached_tokens
        used = Usage(0, tokens, self.num_blocks * self._held_s(now_ns))
        if tokens and not is_lost:
            used.uncached_tokens = max(0, self.prompt_tokens - reused)
        computed = self.prices.prefill_s(self.prompt_tokens, reused) if used.uncached_tokens else 0.0
        context = self.prompt_tokens + self.generated + tokens / 2
        self._put_right(round((computed + self.prices.decode_s(tokens, context, used.kv_block_s)) * NS))
        self.account.used.add(used)
        if tokens and not self.is_endless and not is_lost:
            self.account.learn(generated)

    def cancel(self) -> None:
        """It was placed in vain, and took nothing."""
        if not self.is_over:
            self.is_over = True
            self._put_right(0)

    def _held_s(self, now_ns: int) -> float:
        return 0.0 if self.held_since_ns == _UNKNOWN else max(0, now_ns - self.held_since_ns) / NS

    def _cost_ns(self, reused_tokens: int, tokens: float, kv_block_s: float) -> int:
        context = self.prompt_tokens + self.generated + tokens / 2
        seconds = self.prices.prefill_s(self.prompt_tokens, reused_tokens)
        return round((seconds + self.prices.decode_s(tokens, context, kv_block_s)) * NS)

    def _put_right(self, cost_ns: int) -> None:
        self.shares.correct(self.account, cost_ns - self.charged_ns, self.weight)
        self.charged_ns = cost_ns
