"""The gateway's certificate, its key, and the authority that vouches for callers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvd.linux.plain_file import MAX_PEM_BYTES, NotPlainError, read_plain

log = logging.getLogger(__name__)

COMMON_NAME = "x509_common_name"  # as gRPC names them in a call's auth context
ALTERNATIVE_NAME = "x509_subject_alternative_name"
PEM = "x509_pem_cert"
# How a certificate may write a name: these tags before it, with its length, and then this code.
_WAYS_TO_WRITE = (
    (rb"[\x0c\x13\x14\x16\x81\x82\x86]", "utf-8"),
    (rb"\x14", "latin-1"),
    (rb"\x1e", "utf-16-be"),
    (rb"\x1c", "utf-32-be"),
)
_LENGTH = rb"(?:[\x00-\x7f]|\x81.|\x82..)"


class CertificateError(Exception):
    """A file can't be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the own certificate (and what leads to its root), its key, and a CA's."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> CertificateContents:
        """What they hold; CertificateError where TLS could not be spoken with it."""
        contents = CertificateContents(*(_read(flag, path) for flag, path in self._named()))
        try:
            self._require_usable(contents)
        except OSError as error:  # of the copies that are checked
            raise CertificateError(f"certificates can't be checked: {error.strerror}") from None
        return contents

    def _require_usable(self, contents: CertificateContents) -> None:
        """Of what was read: the files may hold something else by now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _as_file(contents.certificate) as certificate, _as_file(contents.key) as key:
            try:
                context.load_cert_chain(certificate, key, password=_no_password)
            except (ssl.SSLError, ValueError) as error:
                raise CertificateError(
                    f"--certificate {self.certificate} and --key {self.key} are no certificate in"
                    f" PEM with its own key, without a password: {error}"
                ) from None
        with _as_file(contents.authority) as authority:
            try:
                context.load_verify_locations(authority)
            except ssl.SSLError as error:
                raise CertificateError(
                    f"--authority {self.authority} has no certificate in PEM: {error}"
                ) from None

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever one of the files is replaced or written; CertificateError."""
        return tuple(_state(flag, path) for flag, path in self._named())

    def _named(self) -> tuple[tuple[str, Path], ...]:
        return (
            ("--certificate", self.certificate),
            ("--key", self.key),
            ("--authority", self.authority),
        )


@dataclass(frozen=True, slots=True)
class CertificateContents:
    """The bytes of the three files."""

    certificate: bytes
    key: bytes
    authority: bytes


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _state(flag: str, path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise CertificateError(f"{flag} {path} can't be read: {error.strerror}") from None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(flag: str, path: Path) -> bytes:
    """A pipe would be waited for, and with it every new connection."""
    try:
        return read_plain(path, MAX_PEM_BYTES)
    except OSError as error:
        raise CertificateError(f"{flag} {path} can't be read: {error.strerror}") from None
    except NotPlainError as error:
        raise CertificateError(f"{flag} {path} {error}; name another") from None


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """The name of a file in memory with this content: OpenSSL reads keys from files alone."""
    fd = os.memfd_create("kvd-pem", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{fd}"


class Renewal:
    """Takes renewed files for new connections. A set that can't be used leaves the old one."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._state = files.state()
        self._said = ""
        self._lock = threading.Lock()
        self._contents = files.read()

    def credentials(self) -> grpc.ServerCredentials:
        """Every caller must show a certificate of the authority."""
        renewed: Any = self._renewed  # the stubs leave out that it may answer None
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._contents), renewed, require_client_authentication=True
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each new connection; None: nothing is new."""
        with self._lock:
            try:
                state = self._files.state()
                if state == self._state:
                    return None
                self._contents = self._files.read()
            except CertificateError as error:
                if str(error) != self._said:  # once, not at each connection
                    self._said = str(error)
                    log.warning("renewed certificates can't be used, the old ones stay: %s", error)
                return None
            self._state, self._said = state, ""
            log.info("certificates were renewed")
            return _configuration(self._contents)


def _configuration(contents: CertificateContents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], root_certificates=contents.authority
    )


def names_of(auth_context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The names in the caller's certificate, its common name first; gRPC has verified it.

    Without those that have a NUL: gRPC ends them there, and what is left is another's name.
    """
    written = b"".join(_der_of(pem) for pem in auth_context.get(PEM, ()))
    found = [
        raw.decode("utf-8", "backslashreplace")
        for key in (COMMON_NAME, ALTERNATIVE_NAME)
        for raw in auth_context.get(key, ())
        if raw and not _goes_on(raw, written)  # gRPC names a common name that is not there
    ]
    return tuple(dict.fromkeys(found))


def _der_of(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))


def _goes_on(name: bytes, der: bytes) -> bool:
    """Whether a name of this certificate begins with this one and a NUL."""
    for tags, code in _WAYS_TO_WRITE:
        try:
            begins = (name.decode("utf-8") + "\0").encode(code)
        except UnicodeError:  # not to be written so
            continue
        # The first look is quick, and there may be hundreds of names.
        if begins in der and re.search(tags + _LENGTH + re.escape(begins), der, re.DOTALL):
            return True
    return False
