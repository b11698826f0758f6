"""A package that is missing, or that does not import, is one error with what to install."""

import pytest

from dali_pipes.errors import BackendError
from dali_pipes.runtime.optional import optional_package


def test_a_missing_package_is_named_with_its_extras() -> None:
    package = optional_package("no_such_package", "one", "other", purpose="to read a.x", advice=", or do without")
    with pytest.raises(BackendError) as error, package:
        import no_such_package  # type: ignore[import-not-found] # noqa: F401
    assert str(error.value).startswith("no_such_package is required to read a.x, but is not installed")
    assert str(error.value).endswith('pip install "dali-pipes[one]" or "dali-pipes[other]", or do without')


def test_a_broken_package_is_not_called_missing() -> None:
    with pytest.raises(BackendError, match=r"libx\.so\.3") as error, optional_package("x", "extra", purpose="for y"):
        raise ImportError("libx.so.3: cannot open shared object file")
    assert "not installed" not in str(error.value)
    assert isinstance(error.value.__cause__, ImportError)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="mine"), optional_package("x", "extra", purpose="for y"):
        raise ValueError("mine")
