"""The names that a certificate gives its caller."""

from __future__ import annotations

import ssl

import pytest

from kvd.gateway.certificates import COMMON_NAME, PEM, names_of


@pytest.mark.parametrize(
    "written",
    [
        b"\x0c\x0aalice\0evil",
        b"\x82\x0aalice\0evil",
        b"\x82\x81\x8aalice\0" + b"x" * 132,
        b"\x1e\x14" + "alice\0evil".encode("utf-16-be"),
        b"\x1c\x28" + "alice\0evil".encode("utf-32-be"),
    ],
)
def test_a_name_that_goes_on_behind_a_nul_is_known_however_it_is_written(written: bytes) -> None:
    def names(der: bytes) -> tuple[str, ...]:
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        return names_of({COMMON_NAME: [b"alice"], PEM: [pem]})

    assert names(written + b"\x30\x00") == ()
    assert names(b"\x0c\x05alice\x30\x00") == ("alice",)


def test_a_certificate_without_any_name_is_told_so() -> None:
    assert names_of({COMMON_NAME: [b""]}) == ()
