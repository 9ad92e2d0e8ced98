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
