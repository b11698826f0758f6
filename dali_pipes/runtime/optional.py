"""Optional packages, which come with an extra of this package: one error for all that are missing.

with optional_package("pyarrow", "parquet", purpose="to read a.parquet"):
    import pyarrow

pyarrow is required to read a.parquet, but is not installed. Install it with: pip install "dali-pipes[parquet]"
"""

import contextlib
from collections.abc import Iterator

from dali_pipes.errors import BackendError


@contextlib.contextmanager
def optional_package(package: str, *extras: str, purpose: str, advice: str = "") -> Iterator[None]:
    """Inside, an `ImportError` becomes a `BackendError` that says how to install `package`, by one of the `extras`."""
    try:
        yield
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        problem = "is not installed" if is_missing else f"cannot be imported ({error})"
        names = " or ".join(f'"dali-pipes[{extra}]"' for extra in extras)
        raise BackendError(
            f"{package} is required {purpose}, but {problem}. Install it with: pip install {names}{advice}"
        ) from error
