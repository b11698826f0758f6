"""What a request to a store ended with, in our words: theirs show addresses with their signatures.

    404 NoSuchBucket         the bucket data does not exist (404 Not Found)
    400 ExpiredToken         the credentials have expired (400 Bad Request); renew them
    503                      503 Service Unavailable, which passes

The number of the error tells what to do: EACCES, ENOENT, EINVAL ... last; EIO, ECONNRESET ... may pass.
"""

import errno
import re
from typing import Any

from dali_pipes.storage.retries import StoreError
from dali_pipes.uris import Uri

VARIABLES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "gcs": "GOOGLE_", "hf": "HF_"}
"""How the names of the variables of a store begin; otherwise with AZURE_."""
CREDENTIALS = {
    "AWS_": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket,",
    "GOOGLE_": "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z' -]*)")
_HOST = re.compile(r"performing [A-Z]+ https?://(?:[^/\s@]*@)?([^/\s]+)")
_PROFILE = re.compile(r"credential provider: ProfileError: (.*)")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_EXPIRED = re.compile(r"Expired(?:Authentication)?Token|token (?:has|is) expired|Request has expired")
_CLOCK = re.compile(r"RequestTimeTooSkewed")
_REGION = re.compile(
    r"redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint"
)
_RIGHT_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'")
_REDIRECTS = re.compile(r"too many redirects|error following redirect")
_DENIED = (401, 403)
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TOO_MANY = (429, 503)
_NOT_SATISFIABLE = 416


class ChangedError(Exception):
    """The object is not the one that was expected."""


class failures_of:
    """Inside, errors of obstore become `error`, which the caller raises after it: nothing of theirs is chained.

    stall_s, most_s: that a request waits for a byte, and for all of its answer
    """

    error: OSError | ChangedError

    def __init__(self, uri: Uri, stall_s: float, most_s: float) -> None:
        self._uri, self._limits = uri, (stall_s, most_s)

    def __enter__(self) -> "failures_of":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        from obstore.exceptions import BaseError

        if error is None or not isinstance(error, BaseError | OSError | ValueError):
            return False
        self.error = _translated(self._uri, error, *self._limits)
        return True


def _translated(uri: Uri, error: BaseException, stall_s: float, most_s: float) -> OSError | ChangedError:
    from obstore import exceptions

    text = str(error)
    status = _STATUS.search(text)
    number, shown = (int(status[1]), f"{status[1]} {status[2].strip()}".strip()) if status else (0, "")
    if isinstance(error, exceptions.PreconditionError):
        return ChangedError()
    if isinstance(error, exceptions.AlreadyExistsError):
        return FileExistsError(errno.EEXIST, "the object already exists")
    if _NO_BUCKET.search(text):
        return StoreError(errno.ENODEV, f"the bucket {uri.server.rpartition('@')[2]} does not exist ({shown})")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"no such object ({shown or 'not found'})")
    denied = exceptions.UnauthenticatedError | exceptions.PermissionDeniedError
    reason = _reason(uri, text, shown, is_denied=isinstance(error, denied) or number in _DENIED)
    if reason is not None:
        return StoreError(errno.EACCES, reason)
    if "InMemory error: Invalid range" in text:
        return StoreError(errno.ERANGE, "the range is outside the object")
    if isinstance(error, exceptions.NotSupportedError):
        return StoreError(
            errno.EIO,
            "the server sent a whole file or page (200) instead of the requested range: it does not support byte "
            "ranges, or a proxy answered instead",
        )
    if number == _NOT_SATISFIABLE:
        return StoreError(errno.ERANGE, shown)
    if number:
        return StoreError(errno.EIO if number in _PASSING_STATUS else errno.EINVAL, shown, busy=number in _TOO_MANY)
    return _without_answer(uri, error, text, stall_s, most_s)


def _reason(uri: Uri, text: str, shown: str, *, is_denied: bool) -> str | None:
    """Why the store refuses: what nobody but the user can change."""
    profile = _PROFILE.search(text)
    if profile is not None:
        return profile[1]
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        more = '; to use profiles of ~/.aws: pip install "dali-pipes[aws]"' if uri.scheme in ("s3", "s3a") else ""
        needed = CREDENTIALS[VARIABLES.get(uri.scheme, "AZURE_")]
        return f"no credentials were found; set {needed} in the environment{more}"
    if _EXPIRED.search(text):
        return f"the credentials have expired ({shown}); renew them"
    if _CLOCK.search(text):
        return f"the clock of this machine differs too much from the store's ({shown}); correct it"
    if _REGION.search(text):
        right = _RIGHT_REGION.search(text)
        return f"the bucket is in another region; set AWS_REGION{f'={right[1]}' if right else ' to that of the bucket'}"
    if is_denied:
        return f"access is denied{f' ({shown})' if shown else ''}; check the credentials and their permissions"
    return None


def _without_answer(uri: Uri, error: BaseException, text: str, stall_s: float, most_s: float) -> OSError:
    asked = _HOST.search(text)
    host = asked[1] if asked else uri.server.rpartition("@")[2]
    if "kind: Timeout" in text or "TimedOut" in text:
        return StoreError(errno.ETIMEDOUT, f"no answer within {stall_s:g} s, or no complete answer within {most_s:g} s")
    if "dns error" in text:
        return StoreError(errno.EHOSTUNREACH, f"the host {host} cannot be found")
    if "kind: Connect" in text or "ConnectError" in text:
        return StoreError(errno.ECONNREFUSED, f"cannot connect to {host}")
    if _REDIRECTS.search(text):
        return StoreError(errno.ELOOP, "too many redirects; check the address")
    if "kind: Body" in text or "kind: Request" in text or "kind: Interrupted" in text:
        return StoreError(errno.ECONNRESET, "the connection closed before the answer was complete")
    first = re.sub(r"\S+://\S+", "ADDRESS", text.partition("\n")[0])[:200]
    return StoreError(errno.EINVAL, f"{type(error).__name__}: {first}")
