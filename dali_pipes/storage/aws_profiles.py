"""Credentials of AWS profiles, by boto3: keys, roles, SSO and `credential_process` of the files in `~/.aws`.

    AWS_ACCESS_KEY_ID, AWS_SKIP_SIGNATURE       obstore reads these, roles of instances and web identities, no files
    AWS_PROFILE, ~/.aws/config, credentials     this module, where none of the former is set

Files are read anew at each renewal, so what a tool such as `aws sso login` writes there reaches a run.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.runtime.optional import optional_package

_RENEWED_AFTER = timedelta(minutes=15)
"""If they do not say when they expire."""
_MARGIN = timedelta(minutes=5)
"""Renewed this long before they expire: a request may take as long, and obstore asks only once they have expired."""
_DECIDED = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
_NATIVE = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_GIVEN = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")}
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


class ProfileError(Exception):
    """A profile does not provide credentials. The message is for the user and contains no secrets."""


class Profile(NamedTuple):
    """credentials: what obstore asks for them, now and before they expire. settings: of the store."""

    credentials: Callable[[], dict[str, Any]]
    settings: dict[str, str]


def find_profile(purpose: str) -> Profile | None:
    """The profile that the environment names, or the default one of the files; None: obstore looks elsewhere.

    purpose: for messages, such as "to read s3://bucket"

    Blocks: reads files, and may run a process or ask a server of AWS. Raises ProfileError if that fails, BackendError
    for a named profile without boto3.
    """
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    if any(map(os.environ.get, _DECIDED)):
        return None
    if name is None and (any(map(os.environ.get, _NATIVE)) or not _has_files() or not _has_boto3()):
        return None
    with optional_package("boto3", "aws", purpose=f"for the AWS profile {name!r}, {purpose}"):
        import boto3
    with _named_failures():
        session = boto3.Session()
        scoped = session._session.get_scoped_config()
        credentials = session.get_credentials()
        if credentials is None:
            if name is None:
                return None
            raise ProfileError(
                f"the AWS profile {name!r} does not have credentials; add them, or set another AWS_PROFILE"
            )
        _answer(credentials)  # raises what obstore would meet in its first request
    found = {"region": session.region_name, "endpoint": scoped.get("endpoint_url")}
    settings = {key: str(value) for key, value in found.items() if value and not any(map(os.environ.get, _GIVEN[key]))}
    return Profile(_provide, settings)


def _provide() -> dict[str, Any]:
    """What obstore calls now and later, in another thread. Blocks. Raises ProfileError."""
    import boto3

    with _named_failures():
        credentials = boto3.Session().get_credentials()
        if credentials is None:
            raise ProfileError("the AWS profile no longer contains credentials; add them again")
        return _answer(credentials)


def _answer(credentials: Any) -> dict[str, Any]:
    """Credentials of boto3, as obstore takes them."""
    frozen = credentials.get_frozen_credentials()
    expires, now = getattr(credentials, "_expiry_time", None), datetime.now(UTC)
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": expires.astimezone(UTC) - _MARGIN if isinstance(expires, datetime) else now + _RENEWED_AFTER,
    }


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Inside, what boto3 raises is a ProfileError, without what a process of the user wrote."""
    from botocore import exceptions

    try:
        yield
    except exceptions.CredentialRetrievalError as error:
        how = error.kwargs.get("provider", "a provider")
        raise ProfileError(f"cannot get the credentials of the AWS profile: {how} failed") from None
    except (exceptions.SSOError, exceptions.TokenRetrievalError) as error:
        raise ProfileError(f"{_line(error)}; log in with `aws sso login`") from None
    except exceptions.BotoCoreError as error:
        raise ProfileError(_line(error)) from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _has_boto3() -> bool:
    try:
        import boto3  # noqa: F401
    except ImportError:
        return False
    return True


def _has_files() -> bool:
    try:
        return any(Path(os.environ.get(name) or usual).expanduser().is_file() for name, usual in _FILES.items())
    except RuntimeError:  # no home folder
        return False
