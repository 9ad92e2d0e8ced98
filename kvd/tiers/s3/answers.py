"""What the client's errors mean: of an object, of the bucket, and of the way to it."""

from __future__ import annotations

import html
import re

from obstore.exceptions import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from kvd.tiers.s3.hosts import is_kept_from
from kvd.tiers.store import TierError, TierReason, TierTimeout

# What only another configuration mends, whatever its status: 301 or 400 of another region's bucket.
_REFUSALS = (
    "NoSuchBucket",
    "InvalidBucketName",
    "AccessDenied",
    "ExpiredToken",
    "InvalidToken",
    "AuthorizationHeaderMalformed",
    "redirect without LOCATION",
)
_NO_ANSWER = (TierReason.TIMEOUT, TierReason.UNREACHABLE, TierReason.IO_ERROR)
_STATUS = re.compile(r"status code: (\d{3})\b")  # that the bucket answered with
WORDLESS = "performing HEAD"  # it is answered without a word
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")  # its word for what is wrong
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")  # and its sentence
_FIXES = {"RequestTimeTooSkewed": "set this machine's clock"}
# What the client's debugging text says below a request that failed: texts, addresses, and names.
_CAUSES = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.:\[\]]+:\d+(?=,)|\b[A-Z]\w+\b')
_NO_CAUSES = {"Connect", "ConnectError", "Custom", "Error", "Io", "Os", "Other", "OtherError"}
_NO_CAUSES |= {"InvalidData", "Request", "SendRequest", "Some", "Uncategorized"}
# That the other side has ended a connection, in place of an answer to what was sent there.
_HANG_UPS = ("IncompleteMessage", "ConnectionReset", "BrokenPipe")


def meaning_of(error: BaseException) -> type[OSError] | None:
    """What it says of an object, if it says that."""
    if "NoSuchBucket" in str(error):
        return None
    if isinstance(error, NotFoundError | FileNotFoundError):
        return FileNotFoundError
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return FileExistsError
    return None


def had_no_answer(error: BaseException) -> bool:
    """Whether nobody answered, or only what stands before the bucket may have."""
    found = _STATUS.search(str(error))
    answered = found is not None and found[1] < "500"
    return not answered and translated(error).reason in _NO_ANSWER


def was_hung_up(error: BaseException) -> bool:
    """Whether the other side ended the connection in place of an answer."""
    whole = str(error)
    return "error sending request" in whole and any(word in whole for word in _HANG_UPS)


def has_panicked(error: BaseException) -> bool:
    """Whether the client, which is in Rust, broke over an answer that it did not expect."""
    return type(error).__module__.startswith("pyo3_")


def translated(error: BaseException) -> TierError:
    """What a request that failed is to those who asked for it."""
    whole = str(error)
    if has_panicked(error):
        said = f"the client broke, over an answer as no bucket should give: {whole[:300]}"
        return TierError(said, TierReason.IO_ERROR)
    said = _words_in(whole) + first_line(error)
    if is_kept_from(whole):
        where = "it sends us to another host (a redirect), where nothing is asked; look at endpoint"
        return TierError(where, TierReason.REFUSED)
    found = _STATUS.search(whole)  # names and ports have such numbers in them, too
    status = found[1] if found else ""
    refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    refused = refused or status in ("401", "403")
    # A HEAD is answered without a word: its 400 is what other requests are told as ExpiredToken.
    refused = refused or (status == "400" and WORDLESS in whole)
    if refused or any(word in whole for word in _REFUSALS):
        return TierError(said, TierReason.REFUSED)
    if "InsufficientStorage" in whole or status == "507":
        return TierError(said, TierReason.NO_SPACE)
    if status in ("429", "503") or "SlowDown" in whole:
        return TierError(said, TierReason.BUSY)
    if status:
        return TierError(said, TierReason.IO_ERROR)
    if "timed out" in whole or "TimedOut" in whole:
        return TierTimeout(said)
    if "error sending request" in whole or "onnect" in whole:
        return TierError(said, TierReason.UNREACHABLE)
    return TierError(said, TierReason.IO_ERROR)


def _words_in(whole: str) -> str:
    """What the bucket says of itself in the text of an error, with a fix; it may be nothing."""
    code = _CODE.search(whole)
    if code is None:
        return ""
    message = _MESSAGE.search(whole)
    told = " ".join(html.unescape(message[1]).split()) if message else ""
    words = [code[1], told if told.isprintable() else "", _FIXES.get(code[1], "")]
    return "".join(f"{each.rstrip('.')}: " for each in words if each)


def first_line(error: BaseException) -> str:
    """A message without the debugging text behind it, but for why a request got no answer."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0].partition(": <")[0][:300]
    cause = _cause_in(str(error))
    return f"{said}: {cause}" if cause else said


def _cause_in(whole: str) -> str:
    """Why a request got no answer, of the text of an error; nothing where it says nothing of it."""
    _, _, deepest = whole.rpartition("source: reqwest::Error {")
    if deepest == whole:
        return ""
    words = [word for word in _CAUSES.findall(deepest) if word not in _NO_CAUSES]
    cause = " ".join(dict.fromkeys(words))[:300]
    if "InvalidCertificate" in words:
        cause += "; look at endpoint and ca_file"
    return cause
