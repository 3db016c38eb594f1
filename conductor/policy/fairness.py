"""Fair sharing of a model's nodes among tenants: start-time fair queueing (Goyal et al., SIGCOMM 1996).

A request gets a ticket, its virtual start time: the maximum of the current virtual time and the virtual time at which
the tenant's earlier work ends, where work is divided by the tenant's weight. A tenant that has used less than others
has smaller tickets. Use of an otherwise idle cluster is not held against a tenant later, and idling earns no credit.
The number of accounts is bounded: tenants beyond the bound share the account `OTHERS`.

A request is charged by prediction when it is placed, and corrected when it has ended. Charges are in seconds of a
worker's time:

- an uncached prompt token: its share of the prefill, by the cost model;
- a generated token: its share of a step of the largest batch that the decode node runs, so that the price does not
  depend on the other requests there;
- a block of KV held for a second: its share of the decode node's memory.

Work that is lost with a worker is not charged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from conductor.policy.events import NS
from worker.policy.cost_formulas import prefill_s, tbt_s

__all__ = [
    "CREDIT_NS",
    "OTHERS",
    "Account",
    "Charge",
    "Prices",
    "Shares",
    "Usage",
    "VirtualTime",
    "advanced_ns",
]

OTHERS = "other"
_MEMORY = 0.9
_LOOKED_AT = 4  # accounts examined for one that can be removed; few, since placement waits for it
CREDIT_NS = 10_000_000_000  # most virtual time that an account which was idle or not served can catch up on


@dataclass(slots=True)
class Usage:
    """Resources used by a tenant's ended requests."""

    uncached_tokens: int = 0  # prompt tokens that had to be computed
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    generated_tokens: int = 0
    kv_block_s: float = 0.0  # blocks of KV times the seconds for which they were held on the decode node

    def add(self, other: "Usage") -> None:
        """Add another usage to this one."""
        self.uncached_tokens += other.uncached_tokens
        self.cached_tokens += other.cached_tokens
        self.generated_tokens += other.generated_tokens
        self.kv_block_s += other.kv_block_s


@dataclass(slots=True)
class Account:
    """Account of one tenant, or of all tenants that share `OTHERS`."""

    name: str
    number: int  # unique among all models
    finish_ns: int = 0  # virtual time at which its work so far ends
    used: Usage = field(default_factory=Usage)
    usual_tokens: float | None = None  # running mean of its answers' lengths; None before the first
    token: str = field(init=False)  # identifies it in messages to workers and in logs, which must not name tenants

    def __post_init__(self) -> None:
        self.token = blake2b(self.name.encode(), digest_size=8).hexdigest() if self.name else ""

    def learn(self, tokens: int) -> None:
        """Learn from the length of an answer."""
        if self.usual_tokens is None:
            self.usual_tokens = float(tokens)
        else:
            self.usual_tokens = _MEMORY * self.usual_tokens + (1 - _MEMORY) * tokens


@dataclass(slots=True)
class VirtualTime:
    """Virtual time of one class, in ns; it never decreases."""

    now_ns: int = 0
    started_ns: int = 0  # largest ticket of a request that has begun

    def begin(self, ticket_ns: int) -> None:
        """Record that a request with this ticket has begun."""
        self.started_ns = max(self.started_ns, ticket_ns)


def advanced_ns(now_ns: int, started_ns: int, waiting_ns: int) -> int:
    """Return a clock's new `now_ns`: the smallest waiting ticket, but not more than the largest one that has begun.

    `waiting_ns` is -1 if no request waits. The result is at most `CREDIT_NS` behind `started_ns`. Also compiled into
    the queue kernels.
    """
    reached_ns = started_ns if waiting_ns < 0 else min(waiting_ns, started_ns)
    return max(now_ns, reached_ns, started_ns - CREDIT_NS)


class Shares:
    """Accounts and virtual clocks of one model."""

    def __init__(self, numbers: Iterator[int], max_accounts: int, weight_of: Callable[[str], float | None]) -> None:
        """Create the shared account.

        `numbers` yields the account numbers. `weight_of(tenant)` returns None for tenants that the record does not
        name; these have a weight of 1 and at most `max_accounts` accounts. Tenants that it names always have accounts.
        """
        self._numbers = numbers
        self._max_accounts = max_accounts
        self._weight_of = weight_of
        self._accounts: dict[str, Account] = {}  # least recently used first
        self._clocks: dict[int, VirtualTime] = {}
        self._others = self._new(OTHERS)

    def __iter__(self) -> Iterator[Account]:
        """Iterate over all accounts, the shared one last."""
        return iter([*(self._accounts[name] for name in sorted(self._accounts)), self._others])

    def clock(self, level: int) -> VirtualTime:
        """Return the clock of the class of this level."""
        if level not in self._clocks:
            self._clocks[level] = VirtualTime()
        return self._clocks[level]

    def account(self, tenant: str, is_live: Callable[[int], bool]) -> Account:
        """Return the tenant's account, or the shared one if there are too many.

        `is_live(number)` returns True if a live request is charged to that account.
        """
        account = self._accounts.pop(tenant, None)
        if account is None:
            is_named = self._weight_of(tenant) is not None
            if tenant == OTHERS or not (is_named or self._has_room(is_live)):
                return self._others
            account = self._new(tenant)
        self._accounts[tenant] = account
        return account

    def account_of(self, token: str) -> Account:
        """Return the account with this token; the shared one if it is unknown."""
        return next((account for account in self._accounts.values() if account.token == token), self._others)

    def weight(self, account: Account) -> float:
        """Return the account's weight: one with 2 gets twice the share of one with 1."""
        weight = self._weight_of(account.name)
        return 1.0 if weight is None else weight

    def charge(self, account: Account, ticket_ns: int, cost_ns: int) -> float:
        """Charge a placed request with this ticket its expected cost; return the weight that was applied.

        Corrections of the charge must use the same weight, even if the record of objectives changes meanwhile.
        """
        weight = self.weight(account)
        account.finish_ns = ticket_ns + round(cost_ns / weight)
        return weight

    def correct(self, account: Account, by_ns: int, weight: float) -> None:
        """Correct an earlier charge by `by_ns`, which is negative if it was too large."""
        account.finish_ns += round(by_ns / weight)

    def _new(self, name: str) -> Account:
        return Account(name, next(self._numbers))

    def _has_room(self, is_live: Callable[[int], bool]) -> bool:
        """Return True if there is room for another account; one without live requests is removed if necessary."""
        unnamed = [account for name, account in self._accounts.items() if self._weight_of(name) is None]
        if len(unnamed) < self._max_accounts:
            return True
        for account in unnamed[:_LOOKED_AT]:
            if not is_live(account.number):
                # Its usage moves to the shared account, so that sums over tenants never decrease. Requests of the
                # account that have yet to complete add to that, too.
                self._others.used.add(account.used)
                account.used = self._others.used
                del self._accounts[account.name]
                return True
        return False


_UNKNOWN = -1


@dataclass(slots=True)
class Prices:
    """Prices of one model on one pair of nodes."""

    prefill: tuple[float, float, float]  # coefficients of `cost_formulas.prefill_s`
    decode: tuple[float, float, float]  # coefficients of `cost_formulas.tbt_s`
    step_s: float  # typical duration of a decode step
    max_batch: int
    num_blocks: int  # blocks of KV on the decode node; 0: the request does not decode

    def prefill_s(self, prompt_tokens: int, reused_tokens: int, window_tokens: int) -> float:
        """Return the charge of a prompt of which `reused_tokens` were not computed."""
        seen = min(prompt_tokens, window_tokens) if window_tokens else prompt_tokens
        return prefill_s(*self.prefill, prompt_tokens, min(reused_tokens, seen), window_tokens)

    def decode_s(self, generated_tokens: float, context_tokens: float, kv_block_s: float) -> float:
        """Return the charge of tokens generated at this mean context length, and of the blocks held meanwhile."""
        if not self.num_blocks:
            return 0.0
        batch = self.max_batch
        step_s = tbt_s(*self.decode, batch, batch * context_tokens, batch)
        return generated_tokens * step_s / batch + kv_block_s / self.num_blocks


@dataclass(slots=True)
class Charge:
    """Charge of one attempt. `prompt_tokens` excludes the `generated` tokens of earlier attempts.

    `window_tokens` are the most whose KV it holds at once, 0 without a rolling window.
    """

    shares: Shares
    account: Account
    prices: Prices
    prompt_tokens: int
    reused_tokens: int
    generated: int
    num_blocks: int  # committed on the decode node
    is_endless: bool
    window_tokens: int = 0
    charged_ns: int = 0
    weight: float = 1.0  # weight applied to the charge
    held_since_ns: int = _UNKNOWN  # when the decode node reserved the blocks
    is_over: bool = False

    def open(self, ticket_ns: int, max_new_tokens: int) -> None:
        """Charge the expected cost, assuming an answer of the tenant's usual length."""
        usual = self.account.usual_tokens
        tokens = 0.0 if self.is_endless else max_new_tokens if usual is None else min(usual, max_new_tokens)
        held_s = self.num_blocks * tokens * self.prices.step_s
        self.charged_ns = self._cost_ns(self.reused_tokens, tokens, held_s)
        self.weight = self.shares.charge(self.account, ticket_ns, self.charged_ns)

    def begin(self, now_ns: int) -> None:
        """Record that the prefill begins; the decode node has reserved the blocks by then."""
        if self.held_since_ns == _UNKNOWN:
            self.held_since_ns = now_ns

    def accrue(self, now_ns: int) -> None:
        """Charge an endless request for its use up to now, since it may never end."""
        held_s = self._held_s(now_ns)
        self._put_right(self._cost_ns(self.reused_tokens, held_s / self.prices.step_s, self.num_blocks * held_s))

    def close(self, now_ns: int, *, generated: int, cached_tokens: int | None, is_lost: bool) -> None:
        """Replace the predicted charge by that of the actual usage; does nothing if the charge is closed already.

        `generated` counts the tokens of all attempts, `cached_tokens` the prompt tokens that were not computed (None:
        as predicted). `is_lost`: the attempt failed and its work was lost.
        """
        if self.is_over:
            return
        self.is_over = True
        tokens = max(0, generated - self.generated)
        reused = self.reused_tokens if cached_tokens is None else cached_tokens
        used = Usage(generated_tokens=tokens, kv_block_s=self.num_blocks * self._held_s(now_ns))
        if tokens and not is_lost:
            used.uncached_tokens = max(0, self.prompt_tokens - reused)
            used.cached_tokens = min(reused, self.prompt_tokens)
        prompt = self.prompt_tokens, reused, self.window_tokens
        computed = self.prices.prefill_s(*prompt) if used.uncached_tokens else 0.0
        context = self._mean_context(tokens)
        self._put_right(round((computed + self.prices.decode_s(tokens, context, used.kv_block_s)) * NS))
        self.account.used.add(used)
        if tokens and not self.is_endless and not is_lost:
            self.account.learn(generated)

    def cancel(self) -> None:
        """Take the charge back: the request was placed but used nothing."""
        if not self.is_over:
            self.is_over = True
            self._put_right(0)

    def _held_s(self, now_ns: int) -> float:
        return 0.0 if self.held_since_ns == _UNKNOWN else max(0, now_ns - self.held_since_ns) / NS

    def _cost_ns(self, reused_tokens: int, tokens: float, kv_block_s: float) -> int:
        context = self._mean_context(tokens)
        seconds = self.prices.prefill_s(self.prompt_tokens, reused_tokens, self.window_tokens)
        return round((seconds + self.prices.decode_s(tokens, context, kv_block_s)) * NS)

    def _mean_context(self, tokens: float) -> float:
        """Return the mean number of tokens that a generated token sees, of `tokens`."""
        context = self.prompt_tokens + self.generated + tokens / 2
        return min(context, self.window_tokens) if self.window_tokens else context

    def _put_right(self, cost_ns: int) -> None:
        self.shares.correct(self.account, cost_ns - self.charged_ns, self.weight)
        self.charged_ns = cost_ns
