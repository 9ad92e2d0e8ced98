"""Keeps the client of a bucket to the endpoint's host.

The client follows a redirect wherever it leads, and takes the session token along. Nothing can be
set against that. But it may be told of a proxy for all hosts but some: one that is nowhere.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from kvd.tiers.s3.options import S3Options

NOWHERE = "127.0.0.1:0"  # nobody can listen there
_NAME = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z][a-z0-9_-]*")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def kept_to_endpoint(options: S3Options) -> dict[str, str]:
    """Settings of the client with which it reaches no other host.

    None where it must reach others: Amazon's, those that give it the machine's keys, a proxy. Nor
    where the client may spell the host otherwise.
    """
    has_keys = options.access_key_file is not None or all(map(os.environ.get, _KEYS))
    has_proxy = any(value and name.lower() in _PROXIES for name, value in os.environ.items())
    host = urlsplit(options.endpoint).hostname
    if not host or not has_keys or has_proxy or not _is_plain(host):
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": host}


def _is_plain(host: str) -> bool:
    """Whether it is a name or an address as every program spells it."""
    if _NAME.fullmatch(host):
        return True
    try:
        return str(ipaddress.ip_address(host)) == host
    except ValueError:
        return False


def is_kept_from(whole: str) -> bool:
    """Whether an error's whole text is of a request that would have gone to another host."""
    return NOWHERE in whole
