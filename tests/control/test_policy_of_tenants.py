"""Which user is which tenant, and what the policy refuses."""

from __future__ import annotations

import os

import pytest

from kvd.config.tenant_rule import TenantRule
from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.access.tenants import TenantPolicy
from kvd.core.errors import PermissionDenied
from kvd.core.keys import TenantId

ACME, BETA = TenantId("acme"), TenantId("beta")
RULES = (
    TenantRule(ACME, uids=frozenset({1000, 1001})),
    TenantRule(BETA, uids=frozenset({1001}), gids=frozenset({50})),
)


def peer(uid: int, gid: int = 0) -> Peer:
    return Peer(Credentials(uid, gid, 1, None), Role.TOOL, "test", lambda *_: None)


def test_without_rules_everyone_is_the_default_tenant() -> None:
    assert TenantPolicy().tenant_of(peer(4242), "") == "default"


@pytest.mark.parametrize(
    ("uid", "gid", "tenants"),
    [(1000, 0, [ACME]), (1001, 0, [ACME, BETA]), (7, 50, [BETA]), (7, 7, [])],
)
def test_rules_go_by_user_and_group(uid: int, gid: int, tenants: list[str]) -> None:
    assert TenantPolicy(RULES).tenants_of(peer(uid, gid)) == tenants


def test_a_tenant_that_is_not_the_callers_is_refused() -> None:
    policy = TenantPolicy(RULES)
    assert policy.tenant_of(peer(1001), "beta") == BETA
    with pytest.raises(PermissionDenied, match="beta"):
        policy.tenant_of(peer(1000), "beta")
    with pytest.raises(PermissionDenied, match=r"no tenant has uid \d+ or gid \d+: .* `gids`"):
        policy.tenant_of(peer(7), "")


def test_root_the_daemons_user_and_named_users_operate() -> None:
    policy = TenantPolicy(RULES, operators=[77])
    assert [policy.operates(peer(uid)) for uid in (0, os.getuid(), 77, 1000)] == [
        True,
        True,
        True,
        False,
    ]


def test_an_operator_sees_every_tenant_and_others_their_own() -> None:
    policy = TenantPolicy(RULES)
    assert policy.may_see(peer(0), BETA)
    assert policy.may_see(peer(1001), BETA)
    assert not policy.may_see(peer(1000), BETA)
    assert policy.sight(peer(0)) is None, "of every one"
    assert policy.sight(peer(1000)) == frozenset({ACME})


def test_a_user_that_two_tenants_share_is_not_isolated() -> None:
    assert TenantPolicy().isolated(1000)
    by_user = (TenantRule(ACME, frozenset({1})), TenantRule(BETA, frozenset({2, 3})))
    assert TenantPolicy(by_user).isolated(1)
    assert not TenantPolicy((*by_user, TenantRule(TenantId("c"), frozenset({3})))).isolated(3)
    assert not TenantPolicy(by_user).isolated(0)


def test_no_question_walks_over_thousands_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TenantPolicy([TenantRule(TenantId(f"t{n}"), frozenset({n})) for n in range(4096)])
    asked: list[TenantRule] = []
    covers = TenantRule.covers

    def counted(rule: TenantRule, uid: int, gid: int) -> bool:
        asked.append(rule)
        return covers(rule, uid, gid)

    monkeypatch.setattr(TenantRule, "covers", counted)
    user = peer(4000, 4000)
    for rule in policy.rules:
        assert policy.may_see(user, rule.tenant) == (rule.tenant == "t4000")
    assert policy.tenant_of(user, "") == "t4000"
    assert policy.isolated(4000)
    assert len(asked) <= len(policy.rules)


def test_a_tenant_that_has_no_rule_is_nobodys() -> None:
    policy = TenantPolicy(RULES)
    assert not policy.belongs(peer(1001, 50), "gone")
    assert policy.belongs(peer(7, 50), "beta")
    assert TenantPolicy().belongs(peer(7), "default")
    assert not TenantPolicy().belongs(peer(7), "acme")
