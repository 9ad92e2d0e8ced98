"""A user has so many sessions as the operator lets it have."""

from __future__ import annotations

from tests.control.daemon_rig import RawScheduler, daemon, identity, refusal


def test_session_beyond_a_users_share_is_refused_with_the_setting_named() -> None:
    with daemon("--sessions-per-user", "2") as running:
        held = [RawScheduler(running.socket, identity=identity(f"e{n}")) for n in range(2)]
        assert all(each.opened.session_id for each in held)
        third = RawScheduler(running.socket, identity=identity("e2"))
        assert refusal(lambda: third.opened)[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
        held[0].close()
        fourth = RawScheduler(running.socket, identity=identity("e0", b"m" * 16))
        assert fourth.opened.session_id
        for each in (held[1], third, fourth):
            each.close()


def test_a_newer_session_of_an_engine_takes_its_own_place_at_the_bound() -> None:
    """A stream may break and come back before the daemon has ended the earlier session."""
    with daemon("--sessions-per-user", "2") as running:
        held = [RawScheduler(running.socket, identity=identity(f"e{n}")) for n in range(2)]
        assert all(each.opened.session_id for each in held)
        again = RawScheduler(running.socket, identity=identity("e1"))
        assert again.opened.session_id
        other = RawScheduler(running.socket, identity=identity("e2"))
        assert refusal(lambda: other.opened)[1] == "LIMIT_EXCEEDED"
        for each in (*held, again, other):
            each.close()
