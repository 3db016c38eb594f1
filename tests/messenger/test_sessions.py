"""Sessions are used by one connection at a time, and remembered no longer than needed."""

from messenger.sessions import MAX_IDLE_SESSIONS, MAX_REFUSALS, Session, SessionTable


class Wire:
    """A connection that ends when it is cut, or never."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.was_cut = False
        self._stuck = stuck

    def cut(self) -> None:
        self.was_cut = True

    def wait_ended(self, timeout_s: float) -> bool:
        return self.was_cut and not self._stuck


def test_a_second_connection_resumes_the_session_and_ends_the_first() -> None:
    table, first, second = SessionTable(), Wire(), Wire()
    session = table.attach(b"s", first, 1.0)
    assert session is not None
    assert table.attach(b"s", second, 1.0) is session
    assert first.was_cut
    assert not second.was_cut


def test_a_session_is_not_resumed_while_an_earlier_connection_is_stuck() -> None:
    table, stuck = SessionTable(), Wire(stuck=True)
    session = table.attach(b"s", stuck, 1.0)
    for _ in range(2):
        waiting = Wire()
        assert table.attach(b"s", waiting, 1.0) is None
        table.detach(b"s", waiting, forget=False)
    table.detach(b"s", stuck, forget=False)
    assert table.attach(b"s", Wire(), 1.0) is session


def test_goodbye_forgets_the_session_and_a_break_does_not() -> None:
    table, wire = SessionTable(), Wire()
    session = table.attach(b"s", wire, 1.0)
    table.detach(b"s", wire, forget=False)
    assert table.attach(b"s", wire, 1.0) is session
    table.detach(b"s", wire, forget=True)
    assert table.attach(b"s", wire, 1.0) is not session


def test_idle_sessions_are_bounded_and_those_in_use_are_kept() -> None:
    table, used = SessionTable(), Wire()
    session = table.attach(b"used", used, 1.0)
    for number in range(2 * MAX_IDLE_SESSIONS):
        wire = Wire()
        table.attach(b"%d" % number, wire, 1.0)
        table.detach(b"%d" % number, wire, forget=False)
    assert table.attach(b"used", Wire(), 1.0) is session
    assert len(table._sessions) <= MAX_IDLE_SESSIONS + 1


def test_refusals_are_remembered_up_to_a_bound() -> None:
    session = Session()
    for seq in range(MAX_REFUSALS + 1):
        session.refuse(seq, str(seq))
    assert session.refusal(0) is None
    assert session.refusal(MAX_REFUSALS) == str(MAX_REFUSALS)
