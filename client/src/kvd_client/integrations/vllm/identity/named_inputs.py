"""Images and the like whose names their senders chose, which stand for what is in them."""

from __future__ import annotations

import logging
import re
from typing import Any

log = logging.getLogger(__name__)

# A digest of the content, as vLLM makes it; an adapter's name may stand before it.
CONTENT_HASH = re.compile(r"(?:.*:)?[0-9a-f]{64,128}", re.DOTALL)


class NamedInputs:
    """Warns once where a block hash says what a user calls an image, not what is in it."""

    def __init__(self) -> None:
        self._has_warned = False

    def look_at(self, request: Any) -> None:
        """`request` is vLLM's, with multi-modal inputs."""
        if self._has_warned:
            return
        for feature in request.mm_features:
            identifier = str(getattr(feature, "identifier", ""))
            if not CONTENT_HASH.fullmatch(identifier):
                self._has_warned = True
                log.warning(
                    "kvd: request %.64s calls one of its inputs %.64r (a uuid of its own): vLLM's"
                    " block hash then has that name in place of the content's hash, and whoever"
                    " sends another input under the same name, to any engine that shares, is"
                    " answered from this one's KV. Send no uuid, or set unshared",
                    request.request_id,
                    identifier,
                )
                return
