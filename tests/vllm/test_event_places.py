"""What the daemon tells of host memory and tiers, in the words of vLLM's KV events."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, make_offload_key

from kvd_client.event_watch import EventWatch
from kvd_client.integrations.vllm.events import KvEvents
from kvd_client.tier_record import HOST, News, NewsList, Residence

ONE, TWO = (make_offload_key(bytes([n]) * 32, 1) for n in range(2))
OURS = [key[:-4] + bytes(4) for key in (ONE, TWO)]  # vLLM's group 1 is kvd's group 0
DISK = Residence("STORAGE", "LOCAL", "disk")
FAR = Residence("STORAGE", "REMOTE", "far")


@pytest.fixture
def events() -> KvEvents:
    return KvEvents("/nowhere", lambda: None, [1])


def test_each_place_has_vllms_medium_locality_and_owner(
    events: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = [
        News(DISK, removed=False, keys=OURS),
        News(FAR, removed=True, keys=OURS[:1]),
        News(HOST, removed=True, keys=OURS[1:]),
        News(HOST, removed=False, keys=OURS[1:]),
    ]
    monkeypatch.setattr(EventWatch, "take", lambda _: news)
    told = events.pass_on([])
    assert [(e.keys, e.medium, e.removed, e.locality, e.ownership) for e in told] == [
        ([ONE, TWO], Medium.STORAGE, False, Locality.LOCAL, "disk"),
        ([ONE], Medium.STORAGE, True, Locality.REMOTE, "far"),
        ([TWO], Medium.CPU, True, None, None),
        ([TWO], Medium.CPU, False, None, None),
    ]
    assert [e.removal_expected for e in told] == [True, False, False, True]


def test_what_was_said_before_is_not_said_again(events: KvEvents) -> None:
    stored = OffloadingEvent([ONE], Medium.CPU, removed=False)
    both = OffloadingEvent([ONE, TWO], Medium.CPU, removed=False)
    assert [e.keys for e in events.pass_on([stored])] == [[ONE]]
    assert [e.keys for e in events.pass_on([both])] == [[TWO]]
    assert events.pass_on([both]) == []


def test_the_end_of_a_copy_is_told_before_the_next_copy_of_its_block(
    events: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = [News(HOST, removed=True, keys=OURS[:1])]
    monkeypatch.setattr(NewsList, "take_of", lambda _, keys: [news.pop()] if keys else [])
    told = events.pass_on([OffloadingEvent([ONE], Medium.CPU, removed=False)])
    assert [(e.keys, e.removed) for e in told] == [([ONE], True), ([ONE], False)]
