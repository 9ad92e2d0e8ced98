"""Why requests missed, as messages, cut to what the caller may know."""

from __future__ import annotations

from kvd.control.access.peers import Peer
from kvd.control.namespaces import Namespaces
from kvd.core.keys import KeyBatch
from kvd.core.model.gone import NOBODY, Fate, Recalled
from kvd.core.told import Unasked
from kvd.core.upkeep.misses import Explained
from kvd.runtime.driver import Driver
from kvd.runtime.turns import UNITS_AT_ONCE, Pace
from kvd_proto.key_status import HIT, PENDING, RETRY
from kvd_proto.v1 import operator_pb2 as pb

_OF_FATE = {
    Fate.EVICTED: pb.MISS_CAUSE_EVICTED,
    Fate.ROW_TAKEN: pb.MISS_CAUSE_ROW_TAKEN,
    Fate.QUOTA_LOWERED: pb.MISS_CAUSE_QUOTA_LOWERED,
    Fate.CLEARED: pb.MISS_CAUSE_CLEARED,
    Fate.UNUSABLE: pb.MISS_CAUSE_UNUSABLE,
    Fate.DAMAGED: pb.MISS_CAUSE_DAMAGED,
    Fate.FILTERED: pb.MISS_CAUSE_FILTERED,
    Fate.REFUSED: pb.MISS_CAUSE_REFUSED,
    Fate.FAILED: pb.MISS_CAUSE_FAILED,
}
_OF_GIVEN_UP = {
    Unasked.NO_SESSION: pb.MISS_CAUSE_NO_SESSION,
    Unasked.UNANSWERED: pb.MISS_CAUSE_UNANSWERED,
    Unasked.RETRY: pb.MISS_CAUSE_LEASES,
    Unasked.PENDING: pb.MISS_CAUSE_PENDING,
}
_OF_STATUS = {
    HIT: pb.MISS_CAUSE_NOT_TAKEN,
    PENDING: pb.MISS_CAUSE_PENDING,
    RETRY: pb.MISS_CAUSE_LEASES,
}


async def explain(
    driver: Driver, namespaces: Namespaces, peer: Peer, request: str
) -> pb.ExplainResponse:
    """Requests of this name, or whose names begin so, that the caller may see."""
    families = namespaces.families(peer)
    pace = Pace(driver.turns, peer.uid)
    answer = pb.ExplainResponse()
    for explained in driver.machine.explain(
        request, lambda tenant: namespaces.may_see_of(peer, tenant)
    ):
        await pace.spend(UNITS_AT_ONCE)
        recalled = explained.recalled
        message = _message(explained, driver, namespaces, peer)
        family = families.get(namespaces.family_of(recalled.namespace), ())
        for place in driver.machine.elsewhere(recalled, family):
            differs = namespaces.differences(recalled.namespace, [place.namespace])
            message.elsewhere.add(
                namespace_id=place.namespace,
                epoch=place.epoch,
                other_account=place.account != recalled.told.account,
                differs=differs.get(str(place.namespace), ""),
            )
        answer.requests.append(message)
    return answer


def _message(
    explained: Explained, driver: Driver, namespaces: Namespaces, peer: Peer
) -> pb.ExplainedRequest:
    recalled, told = explained.recalled, explained.recalled.told
    message = pb.ExplainedRequest(
        request_id=told.request,
        engine_id=recalled.engine,
        tenant=recalled.tenant,
        namespace_id=recalled.namespace,
        epoch=recalled.epoch,
        account=told.account,
        age_seconds=(driver.clock.now_ns() - recalled.at_ns) / 1e9,
        prompt_tokens=told.prompt_tokens,
        device_tokens=told.device_tokens,
        found_tokens=told.found_tokens,
        all_known=explained.is_all_known,
    )
    if told.missed is None:
        return message
    message.missed_group, message.missed_block = told.missed.group, told.missed.block
    message.missed_hash = KeyBatch(told.missed.words, recalled.hash_bytes).to_bytes()
    _tell_cause(message, recalled, driver.began_ns)
    cause = recalled.cause
    if message.cause in _OF_FATE.values() and cause is not None:
        message.reason = cause.why.reason
        message.unused_seconds = cause.unused_s
        if cause.why.by != NOBODY and namespaces.may_see(peer, cause.why.by):
            message.by_namespace_id = cause.why.by
            message.by_tenant = namespaces.fields(cause.why.by).get("tenant", "")
    return message


def _tell_cause(message: pb.ExplainedRequest, recalled: Recalled, began_ns: int) -> None:
    told, cause = recalled.told, recalled.cause
    assert told.missed is not None, "it missed nothing"
    if told.given_up is not Unasked.NOT:
        message.cause = _OF_GIVEN_UP[told.given_up]
    elif told.missed.status in _OF_STATUS:
        message.cause = _OF_STATUS[told.missed.status]
    elif cause is not None:
        message.cause, message.cause_seconds = _OF_FATE[cause.why.fate], cause.before_s
    elif recalled.epoch_entered_ns is not None:
        message.cause = pb.MISS_CAUSE_EPOCH
        message.cause_seconds = (recalled.at_ns - recalled.epoch_entered_ns) / 1e9
    elif recalled.cleared_ns is not None:
        message.cause = pb.MISS_CAUSE_NAMESPACE_CLEARED
        message.cause_seconds = (recalled.at_ns - recalled.cleared_ns) / 1e9
    else:
        message.cause = pb.MISS_CAUSE_NEVER_STORED
        message.cause_seconds = (recalled.at_ns - began_ns) / 1e9
