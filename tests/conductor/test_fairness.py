"""Accounts of tenants: shares by weight, no credit beyond a bound, bounded state, charges put right."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.errors import ObjectivesError
from conductor.policy.fairness import CREDIT_NS, OTHERS, Account, Charge, Prices, Shares, VirtualTime, advanced_ns
from conductor.policy.objectives import ObjectiveBook, parse_record, record_to_plain

S = 1_000_000_000
PRICES = Prices((0.0, 0.001, 0.0), (0.01, 0.001, 0.0), step_s=0.05, max_batch=10, num_blocks=100)


def shares(max_accounts: int = 8, **weights: float) -> Shares:
    return Shares(count(), max_accounts, weights.get)


def nobody(number: int) -> bool:
    return False


class Server:
    """One server that serves the smallest ticket; every tenant always has work waiting."""

    def __init__(self, **weights: float) -> None:
        self.shares = shares(**weights)
        self.clock = self.shares.clock(0)
        self.waiting: dict[str, tuple[int, int]] = {}  # ticket, cost
        self.served_ns = dict.fromkeys(weights, 0)

    def ask(self, tenant: str, cost_ns: int) -> None:
        account = self.shares.account(tenant, nobody)
        least = min((ticket for ticket, _ in self.waiting.values()), default=-1)
        self.clock.now_ns = advanced_ns(self.clock.now_ns, self.clock.started_ns, least)
        ticket = max(self.clock.now_ns, account.finish_ns)
        self.waiting[tenant] = ticket, cost_ns
        self.shares.charge(account, ticket, cost_ns)

    def serve(self) -> str:
        tenant = min(self.waiting, key=lambda name: (self.waiting[name][0], name))
        ticket, cost_ns = self.waiting.pop(tenant)
        self.clock.begin(ticket)
        self.served_ns[tenant] += cost_ns
        return tenant


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8).map(float), min_size=2),
    st.lists(st.integers(1, 5), min_size=50, max_size=200),
)
def test_tenants_with_work_get_shares_by_their_weights(weights: dict[str, float], costs: list[int]) -> None:
    """Between any two of them the difference is at most that of one request of each (Goyal et al., theorem 1)."""
    server = Server(**weights)
    for tenant in sorted(weights):
        server.ask(tenant, S)
    for cost in costs:
        server.ask(server.serve(), cost * S)
        per_weight = [server.served_ns[tenant] / weight for tenant, weight in weights.items()]
        longest = max(5 * S / weight for weight in weights.values())
        assert max(per_weight) - min(per_weight) <= 2 * longest + 1


def test_a_tenant_that_was_idle_goes_first_once_and_then_shares() -> None:
    server = Server(busy=1.0, idle=1.0)
    server.ask("busy", S)
    for _ in range(1000):
        server.ask(server.serve(), S)
    server.ask("idle", S)
    order = []
    for _ in range(8):
        order.append(server.serve())
        server.ask(order[-1], S)
    assert order.count("idle") == 4
    assert "idle idle" not in " ".join(order)


def test_who_used_the_cluster_alone_is_not_held_to_it_later() -> None:
    server = Server(alone=1.0, late=1.0)
    server.ask("alone", S)
    for _ in range(1000):
        server.ask(server.serve(), S)
    server.ask("late", S)
    first = [server.serve()]
    server.ask(first[0], S)
    assert "alone" in {*first, server.serve()}


def test_one_that_cannot_be_served_holds_up_virtual_time_for_so_long_and_no_longer() -> None:
    clock = VirtualTime()
    clock.begin(5 * S)
    assert advanced_ns(0, clock.started_ns, 2 * S) == 2 * S
    clock.begin(1000 * S)
    assert advanced_ns(2 * S, clock.started_ns, 2 * S) == 1000 * S - CREDIT_NS
    assert advanced_ns(2 * S, clock.started_ns, -1) == 1000 * S
    assert advanced_ns(1000 * S, clock.started_ns, 3 * S) == 1000 * S


def test_tenants_beyond_the_bound_share_one_account_and_idle_ones_make_room() -> None:
    known = shares(2, named=1.0)
    live = {known.account(name, nobody).number for name in ("a", "b")}
    assert known.account("c", live.__contains__).name == OTHERS
    assert known.account("named", live.__contains__).name == "named"
    known.account("a", nobody).used.generated_tokens = 7
    known.account("b", nobody)
    assert known.account("d", nobody).name == "d"  # in the place of a, which was asked for longest ago
    assert [account.name for account in known] == ["b", "d", "named", OTHERS]
    assert next(account for account in known if account.name == OTHERS).used.generated_tokens == 7
    assert known.account(OTHERS, nobody).number not in live


def test_what_is_told_of_a_request_after_its_account_made_room_is_not_lost() -> None:
    known = shares(1)
    gone = known.account("a", nobody)
    late = charge_of(known, gone)
    late.open(0, 100)
    assert known.account("b", nobody).name == "b"
    late.close(S, generated=7, cached_tokens=None, is_lost=False)
    assert {account.name: account.used.generated_tokens for account in known} == {"b": 0, OTHERS: 7}


def charge_of(known: Shares, account: Account, *, generated: int = 0, is_endless: bool = False) -> Charge:
    return Charge(
        known,
        account,
        PRICES,
        prompt_tokens=1000,
        reused_tokens=400,
        generated=generated,
        num_blocks=10,
        is_endless=is_endless,
    )


def test_what_is_charged_is_what_was_used_whatever_was_expected() -> None:
    known = shares()
    account = known.account("a", nobody)
    charge = charge_of(known, account)
    charge.open(5 * S, max_new_tokens=5000)
    assert account.finish_ns > 20 * S
    charge.begin(100 * S)
    charge.close(104 * S, generated=20, cached_tokens=600, is_lost=False)
    # 400 tokens at 1 ms; 20 of a batch of ten, whose step is 20 ms; a tenth of the memory for 4 s.
    assert account.finish_ns == 5 * S + round((0.4 + 20 * 0.002 + 0.4) * S)
    assert (account.used.uncached_tokens, account.used.cached_tokens) == (400, 600)
    assert (account.used.generated_tokens, account.used.kv_block_s) == (20, 40.0)
    charge.close(200 * S, generated=900, cached_tokens=0, is_lost=False)
    assert account.used.generated_tokens == 20


def test_a_request_that_never_began_costs_nothing() -> None:
    known = shares()
    account = known.account("a", nobody)
    for end in ("cancel", "close"):
        charge = charge_of(known, account)
        charge.open(5 * S, max_new_tokens=50)
        if end == "cancel":
            charge.cancel()
        else:
            charge.close(9 * S, generated=0, cached_tokens=None, is_lost=False)
        assert account.finish_ns == 5 * S
    assert account.used.uncached_tokens == 0


@pytest.mark.parametrize(("before", "after"), [(0.01, 100.0), (100.0, 0.01)])
def test_a_weight_that_changes_meanwhile_gives_back_what_was_taken(before: float, after: float) -> None:
    weights = {"a": before}
    known = Shares(count(), 8, weights.get)
    account = known.account("a", nobody)
    charge = charge_of(known, account)
    charge.open(5 * S, max_new_tokens=5000)
    weights["a"] = after
    charge.cancel()
    assert account.finish_ns == 5 * S


def test_what_a_lost_worker_had_computed_is_charged_to_nobody() -> None:
    known = shares()
    account = known.account("a", nobody)
    first = charge_of(known, account)
    first.open(0, max_new_tokens=50)
    first.close(S, generated=10, cached_tokens=400, is_lost=True)
    second = charge_of(known, account, generated=10)
    second.open(account.finish_ns, max_new_tokens=40)
    second.close(2 * S, generated=50, cached_tokens=None, is_lost=False)
    assert (account.used.uncached_tokens, account.used.cached_tokens) == (600, 400)
    assert account.used.generated_tokens == 50


def test_an_answer_is_expected_to_be_as_long_as_the_tenants_usually_are() -> None:
    known = shares()
    account = known.account("a", nobody)
    for _ in range(20):
        charge = charge_of(known, account)
        charge.open(0, max_new_tokens=5000)
        charge.close(0, generated=10, cached_tokens=None, is_lost=False)
    charge = charge_of(known, account)
    charge.open(0, max_new_tokens=5000)
    assert account.finish_ns == round((0.6 + 10 * 0.002 + 10 * 10 * 0.05 / 100) * S)


def test_an_endless_request_is_charged_as_it_goes_and_teaches_nothing() -> None:
    known = shares()
    account = known.account("a", nobody)
    charge = charge_of(known, account, is_endless=True)
    charge.open(0, max_new_tokens=5000)
    assert account.finish_ns == round(0.6 * S)
    charge.begin(S)
    charge.accrue(S)
    charge.accrue(101 * S)
    assert account.finish_ns == round((0.6 + 2000 * 0.002 + 10) * S)
    charge.close(101 * S, generated=2000, cached_tokens=400, is_lost=False)
    assert account.finish_ns == round((0.6 + 2000 * 0.002 + 10) * S)
    assert account.usual_tokens is None


def test_the_record_of_objectives_gives_tenants_their_weights() -> None:
    said = {"tenants": {"big": {"weight": 3}, "usual": {"class": "c"}}, "classes": {"c": {}}}
    record = parse_record(said)
    book = ObjectiveBook(record)
    assert (book.weight_of("big"), book.weight_of("usual"), book.weight_of("nobody")) == (3.0, 1.0, None)
    assert parse_record(record_to_plain(record)) == record


@pytest.mark.parametrize("weight", [0, -1, 101, True, "3", float("nan")])
def test_an_absurd_weight_is_refused_by_name(weight: object) -> None:
    with pytest.raises(ObjectivesError, match=r"tenants\.a\.weight is .*: expected a number from 0\.01 to 100"):
        parse_record({"tenants": {"a": {"weight": weight}}})
