"""`Uri` has the members of a path, for names of any letters, and shows no credentials."""

import pickle
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.uris import SCHEMES, Uri, check_uri, is_uri

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and name.strip()
)


@given(st.lists(NAMES, min_size=1, max_size=4), NAMES, st.sampled_from(["s3", "memory", "hf"]))
def test_members_are_those_of_a_path(parts: list[str], other: str, scheme: str) -> None:
    uri, path = Uri(f"{scheme}://bucket/{'/'.join(parts)}"), PurePosixPath("/".join(parts))
    assert (uri.scheme, uri.server, uri.path, uri.name) == (scheme, "bucket", str(path), path.name)
    assert uri.suffix == path.suffix
    assert uri.parent / path.name == uri
    assert (uri / other).path == str(path / other)
    assert uri.with_name(other).path == str(path.with_name(other))
    assert uri.with_suffix(".idx").path == str(path.with_suffix(".idx"))
    assert isinstance(uri.parent, Uri)
    assert uri.as_folder() == Uri(f"{uri}/").as_folder() == uri
    assert Uri("s3://bucket/a").parent == Uri("s3://bucket") == Uri("s3://bucket/").as_folder()
    assert pickle.loads(pickle.dumps(uri)) == uri


@given(st.lists(NAMES, min_size=1, max_size=3), NAMES)
def test_names_of_the_web_are_decoded(parts: list[str], other: str) -> None:
    uri = Uri("https://host")
    for part in parts:
        uri = uri / part
    assert uri.path == "/".join(parts).strip("/")
    assert uri.with_name(other).name == other
    assert "?" not in uri
    assert " " not in uri


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        ("https://host/a.bin?X-Amz-Signature=s3cr3t", "https://host/a.bin?***"),
        ("https://me:s3cr3t@host/a.bin", "https://***@host/a.bin"),
        ("https://s3cr3t@host/a.bin?id=7&file=a", "https://***@host/a.bin?id=7&file=a"),
        ("https://host/a.bin?id=7&sig=s3cr3t", "https://host/a.bin?***"),
        ("s3://key:s3cr3t@bucket/a.bin", "s3://***@bucket/a.bin"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
        ("s3://bucket/is it?.bin", "s3://bucket/is it?.bin"),
        ("ftps://me:s3cr3t@host/a?token=s3cr3t", "ftps://***@host/a?***"),
    ],
)
def test_what_is_shown(given_: str, shown: str) -> None:
    uri = Uri(given_)
    for text in (str(uri), repr(uri)[1:-1], f"{uri}", uri.with_name("a.bin").partition("?")[0] and f"{uri:s}"):
        assert text == shown
    assert uri.full == given_
    assert "s3cr3t" not in f"{uri.parent} {uri / 'x'} {uri.with_suffix('.idx')} {[uri]!r}"
    assert Uri(uri).full == given_


@pytest.mark.parametrize("scheme", SCHEMES)
def test_known_schemes_pass(scheme: str) -> None:
    check_uri(f"{scheme}://host/a", "corpus")
    check_uri(f"{scheme.upper()}://host/a", "corpus")


@pytest.mark.parametrize("text", ["data/a.bin", "/s3/a", "synthetic:10B", "C:/a", "a:b", "x.bin", "", "~/a"])
def test_paths_are_no_uris(text: str) -> None:
    assert not is_uri(text)
    check_uri(text, "corpus")
