"""An image that goes by its sender's name for it is warned of; one called by its content isn't."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from kvd_client.integrations.vllm.identity.named_inputs import NamedInputs

CONTENT = hashlib.sha256(b"image").hexdigest()


def request(*identifiers: str) -> SimpleNamespace:
    features = [SimpleNamespace(identifier=identifier) for identifier in identifiers]
    return SimpleNamespace(request_id="r", mm_features=features)


@pytest.mark.parametrize("named", [CONTENT, f"adapter:{CONTENT}", CONTENT * 2])
def test_a_hash_of_the_content_is_nothing_to_warn_of(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    NamedInputs().look_at(request(named))
    assert not caplog.text


def test_a_name_of_the_senders_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = NamedInputs()
    seen.look_at(request(CONTENT, "my-cat"))
    seen.look_at(request("my-dog"))
    assert caplog.text.count("block hash") == 1
    assert "my-cat" in caplog.text
