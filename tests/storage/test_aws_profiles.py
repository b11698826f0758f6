"""Profiles of ~/.aws: whose keys sign a request, in which region, and what is said if there are none."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from range_server import RangeServer

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import BackendError, ConfigError, CorpusReadError, DaliPipesError
from dali_pipes.storage import stores

pytestmark = pytest.mark.needs("obstore", "boto3")

SECRET = "wJalrSecret"
FILES = {
    "config": f"""
        [profile process]
        region = eu-west-7
        credential_process = {sys.executable} FOLDER/print_keys.py
        [profile broken]
        credential_process = {sys.executable} -c "import sys; sys.exit('{SECRET}')"
        [profile sso]
        sso_start_url = https://x.awsapps.com/start
        sso_region = us-east-1
        sso_account_id = 123456789012
        sso_role_name = Reader
        [profile empty]
        region = eu-west-7
    """,
    "credentials": f"""
        [default]
        aws_access_key_id = AKDEFAULT
        aws_secret_access_key = {SECRET}
        [lab]
        aws_access_key_id = AKLAB
        aws_secret_access_key = {SECRET}
    """,
}


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, str]]]:
    """Read an object with variables of the environment: access key and region of the signature."""
    for name in [name for name in __import__("os").environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    for name, text in FILES.items():
        lines = [line.strip() for line in text.replace("FOLDER", str(tmp_path)).splitlines()]
        (tmp_path / ".aws" / name).write_text("\n".join(lines))
    keys = {"Version": 1, "AccessKeyId": "AKPROCESS", "SecretAccessKey": SECRET, "SessionToken": "t0ken"}
    keys["Expiration"] = "2099-01-01T00:00:00Z"
    (tmp_path / "print_keys.py").write_text(f"print({json.dumps(json.dumps(keys))})")
    monkeypatch.setattr(stores, "_stores", {})
    with RangeServer({"data/a.bin": bytes(2000)}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")

        def read(**variables: str) -> tuple[str, str]:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                open_corpus("s3://data/a.bin").close()
            found = re.search(r"Credential=(\w+)/\d+/([\w-]+)/s3", server.requests[-1].authorization or "")
            assert found is not None
            return found[1], found[2]

        yield read


def test_whose_keys_sign(signer: Callable[..., tuple[str, str]]) -> None:
    assert signer() == ("AKDEFAULT", "us-east-1")
    assert signer(AWS_PROFILE="lab", AWS_REGION="ap-south-9") == ("AKLAB", "ap-south-9")
    assert signer(AWS_PROFILE="process") == ("AKPROCESS", "eu-west-7")
    assert signer(AWS_PROFILE="process", AWS_REGION="us-west-5") == ("AKPROCESS", "us-west-5")
    of_environment = {"AWS_ACCESS_KEY_ID": "AKENV", "AWS_SECRET_ACCESS_KEY": SECRET}
    assert signer(AWS_PROFILE="lab", **of_environment) == ("AKENV", "us-east-1")


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("nobody", ["nobody", "could not be found"]),
        ("broken", ["custom-process failed"]),
        ("sso", ["SSO", "aws sso login"]),
        ("empty", ["'empty'", "does not have credentials"]),
    ],
)
def test_a_profile_without_credentials(
    signer: Callable[..., tuple[str, str]], capfd: pytest.CaptureFixture[str], profile: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        signer(AWS_PROFILE=profile)
    message = str(raised.value)
    assert all(part in message for part in ("s3://data/a.bin", *said)), message
    assert message.count("\n") == 0
    assert SECRET not in message


def test_credentials_that_cannot_be_renewed(
    signer: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-run: the process that gives them fails once they expire."""
    keys = {"Version": 1, "AccessKeyId": "AKSHORT", "SecretAccessKey": SECRET, "SessionToken": "t"}
    script = tmp_path / "print_keys.py"
    script.write_text(
        "import datetime, json\n"
        "soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)\n"
        f"print(json.dumps({{**{keys}, 'Expiration': soon.isoformat()}}))"
    )
    assert signer(AWS_PROFILE="process")[0] == "AKSHORT"
    script.write_text(f"import sys; sys.exit('{SECRET}')")
    with pytest.raises(CorpusReadError, match="custom-process failed") as raised:
        signer(AWS_PROFILE="process")
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value.__context__)


def test_without_boto3(signer: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BackendError, match=r"'lab'.*dali-pipes\[aws\]"):
        signer(AWS_PROFILE="lab")
    with pytest.raises(DaliPipesError, match=r"dali-pipes\[aws\]"):  # the files may have what is missing
        signer()
