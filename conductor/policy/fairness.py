"""Fair sharing of a model's cluster among tenants: start-time fair queueing (Goyal et al., SIGCOMM 1996). Pure.

Work is counted in one unit, nanoseconds of a worker's time (`charges` says how each thing is priced). A request of a
tenant gets a ticket, its virtual start time: the later of the present virtual time and of where the tenant's earlier
work ends, divided by its weight. Whoever has used less than others has the smaller tickets; nobody who used the idle
cluster alone is held to it later, and nobody saves up by using nothing.

Accounts are bounded: tenants beyond the bound share the account `OTHERS`.

What a request is charged: predicted when it is placed, put right when it has ended. Pure.

The unit is a second of a worker's time:

- an uncached prompt token: its share of the prefill, as the cost model has it;
- a generated token: its share of a step of the fullest batch that the decode node runs, so that the price does not
  depend on who else happens to be there;
- a block of KV held for a second: its share of the decode node's memory.

What a lost worker had computed is charged to nobody.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from worker.policy.cost_formulas import prefill_s, tbt_s

__all__ = [
    "CREDIT_NS",
    "OTHERS",
    "Account",
    "Charge",
    "Prices",
    "Shares",
    "Usage",
    "VirtualClock",
    "advanced_ns",
]

OTHERS = "other"
_MEMORY = 0.9
_LOOKED_AT = 4  # accounts, for one that can go: this is done while a request waits for its place
CREDIT_NS = 10_000_000_000  # who was idle, or could not be served, catches up on so much and no more


@dataclass(slots=True)
class Usage:
    """Resources used by a tenant's ended requests."""

    uncached_tokens: int = 0  # prompt tokens that had to be computed
    generated_tokens: int = 0
    kv_block_s: float = 0.0  # blocks of KV, times the seconds for which they were held where the request decoded

    def add(self, other: "Usage") -> None:
        """Count another usage, too."""
        self.uncached_tokens += other.uncached_tokens
        self.generated_tokens += other.generated_tokens
        self.kv_block_s += other.kv_block_s


@dataclass(slots=True)
class Account:
    """One tenant, or `OTHERS`."""

    name: str
    number: int  # of no other account of any model
    finish_ns: int = 0  # virtual: where its work so far ends
    used: Usage = field(default_factory=Usage)
    usual_tokens: float | None = None  # of its answers lately; None before the first
    token: str = field(init=False)  # names it to workers and in logs, which are to know no tenants

    def __post_init__(self) -> None:
        self.token = blake2b(self.name.encode(), digest_size=8).hexdigest() if self.name else ""

    def learn(self, tokens: int) -> None:
        """An answer was so long."""
        if self.usual_tokens is None:
            self.usual_tokens = float(tokens)
        else:
            self.usual_tokens = _MEMORY * self.usual_tokens + (1 - _MEMORY) * tokens


@dataclass(slots=True)
class VirtualClock:
    """Virtual time of one class, in ns; never goes back."""

    now_ns: int = 0
    started_ns: int = 0  # the largest ticket with which a request began

    def begin(self, ticket_ns: int) -> None:
        """A request with this ticket is being computed now."""
        self.started_ns = max(self.started_ns, ticket_ns)


def advanced_ns(now_ns: int, started_ns: int, waiting_ns: int) -> int:
    """A clock's new `now_ns`: as late as the smallest ticket that still waits (-1: nobody waits), or, if less, as the
    largest that began; and at most `CREDIT_NS` behind that one. Compiled where lines are looked through."""
    reached_ns = started_ns if waiting_ns < 0 else min(waiting_ns, started_ns)
    return max(now_ns, reached_ns, started_ns - CREDIT_NS)


class Shares:
    """The accounts of one model."""

    def __init__(self, numbers: Iterator[int], max_accounts: int, weight_of: Callable[[str], float | None]) -> None:
        """`numbers` gives each account its own. `weight_of(tenant)`: None where nothing is said, which weighs 1;
        those of whom something is said always have accounts of their own, beside `max_accounts` others."""
        self._numbers = numbers
        self._max_accounts = max_accounts
        self._weight_of = weight_of
        self._accounts: dict[str, Account] = {}  # least recently asked for first
        self._clocks: dict[int, VirtualClock] = {}
        self._others = self._new(OTHERS)

    def __iter__(self) -> Iterator[Account]:
        """All accounts, the shared one last."""
        return iter([*(self._accounts[name] for name in sorted(self._accounts)), self._others])

    def clock(self, level: int) -> VirtualClock:
        """Return the clock of the class of this level."""
        if level not in self._clocks:
            self._clocks[level] = VirtualClock()
        return self._clocks[level]

    def account(self, tenant: str, is_live: Callable[[int], bool]) -> Account:
        """The tenant's own, or the shared one where there are too many. `is_live(number)`: some request is that
        account's."""
        account = self._accounts.pop(tenant, None)
        if account is None:
            is_named = self._weight_of(tenant) is not None
            if tenant == OTHERS or not (is_named or self._has_room(is_live)):
                return self._others
            account = self._new(tenant)
        self._accounts[tenant] = account
        return account

    def account_of(self, token: str) -> Account:
        """The one that goes by this token; the shared one where it is not known here."""
        return next((account for account in self._accounts.values() if account.token == token), self._others)

    def weight(self, account: Account) -> float:
        """A share of 2 is twice one of 1."""
        weight = self._weight_of(account.name)
        return 1.0 if weight is None else weight

    def charge(self, account: Account, ticket_ns: int, cost_ns: int) -> float:
        """A request with this ticket is placed; it is expected to cost so much. Returns the weight that it is charged
        by, which is its own to the end: a record that changes meanwhile must not give back less than was taken."""
        weight = self.weight(account)
        account.finish_ns = ticket_ns + round(cost_ns / weight)
        return weight

    def correct(self, account: Account, by_ns: int, weight: float) -> None:
        """Correct an earlier charge by `by_ns`, which is negative if it was too large."""
        account.finish_ns += round(by_ns / weight)

    def _new(self, name: str) -> Account:
        return Account(name, next(self._numbers))

    def _has_room(self, is_live: Callable[[int], bool]) -> bool:
        """Room for one more: of those asked for longest ago one that has no request makes it."""
        unnamed = [account for name, account in self._accounts.items() if self._weight_of(name) is None]
        if len(unnamed) < self._max_accounts:
            return True
        for account in unnamed[:_LOOKED_AT]:
            if not is_live(account.number):
                # So that sums over tenants never fall; requests whose last word is still to come count there, too.
                self._others.used.add(account.used)
                account.used = self._others.used
                del self._accounts[account.name]
                return True
        return False


NS = 1_000_000_000
_UNKNOWN = -1


@dataclass(slots=True)
class Prices:
    """Prices of one model on one pair of nodes. With `num_blocks` 0 the request decodes nowhere."""

    prefill: tuple[float, float, float]  # coefficients, as are the next
    decode: tuple[float, float, float]
    step_s: float  # of the batch that there usually is
    max_batch: int
    num_blocks: int  # of KV on the decode node

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Return the charge of a prompt, a part of which was already computed."""
        return prefill_s(*self.prefill, prompt_tokens, min(reused_tokens, prompt_tokens))

    def decode_s(self, generated_tokens: float, context_tokens: float, kv_block_s: float) -> float:
        """Return the charge of tokens generated after this context, and of the blocks held meanwhile."""
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
        """Charge an endless request for its use up to now, since it may never end."""
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
