"""The errors that the package raises for problems its user can fix.

DaliPipesError
├── ConfigError             a setting is unknown, missing, invalid, or contradicts another (also a ValueError)
├── CorpusError             the data is not valid (also a ValueError)
│   ├── CorpusFormatError   unknown, unsupported or damaged file format; index and data disagree
│   ├── CorpusReadError     a file is missing, was truncated or cannot be read (also an OSError)
│   └── TokenRangeError     an id is negative, or at or above `vocab_size`
├── CorpusWriteError        token files cannot be written: disk full, permission denied (also an OSError)
├── SampleError             an item of a dataset raised an error, or the worker that read it died (also a RuntimeError)
├── StateError              a saved state does not match this corpus or configuration (also a ValueError)
├── GraphError              the graph= of a SampleLoader failed or does not match the samples (also a RuntimeError)
├── LoaderClosedError       the loader was closed, or this iterator was superseded (also a RuntimeError)
└── BackendError            a required package, compiler or device is missing or failed (also a RuntimeError)

Each message says what was found (file, position, value), what was expected, and what to do.
"""

EMPTY_PATH = "the path is empty; expected a file, folder or glob ('.' is the current folder)"
WEIGHTS_IN_MIXTURE = (
    'to mix corpora by weight, use mixture instead, such as mixture = {web = {corpus = "web/*.bin", weight = 0.7}, ...}'
)


class DaliPipesError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(DaliPipesError, ValueError):
    """A setting is unknown, missing, invalid, or contradicts another."""

    problems: tuple[tuple[str, str], ...] = ()
    """For a configuration: each invalid setting and the problem; "" if several settings contradict each other."""


class CorpusError(DaliPipesError, ValueError):
    """The data of the corpus is not valid."""


class CorpusFormatError(CorpusError):
    """A file's format is unknown, unsupported or damaged, or an index disagrees with its data."""


class CorpusReadError(CorpusError, OSError):
    """A file is missing, cannot be read, or was truncated since it was opened."""


class TokenRangeError(CorpusError):
    """A token id is negative, or at or above `vocab_size`."""


class StateError(DaliPipesError, ValueError):
    """A saved state does not match this corpus or this configuration."""


class LoaderClosedError(DaliPipesError, RuntimeError):
    """The loader was closed, or this iterator was superseded by a newer one."""


class GraphError(DaliPipesError, RuntimeError):
    """The `graph=` of a `SampleLoader` failed on a batch, or does not match its samples."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position
        """Position of the sample in its batch, from 0; None if the error is not about one sample."""


class BackendError(DaliPipesError, RuntimeError):
    """A required package, compiler or device is missing, or the device failed."""


class SampleError(DaliPipesError, RuntimeError):
    """A batch could not be made: an item raised an error, samples cannot be collated, or a worker died.

    If an item raised an error, that error is the `__cause__`.
    """

    item: int | None = None
    """Index of the item in the dataset; None if the error is not about one item."""
    epoch: int | None = None
    row: int | None = None
    """Row in the epoch, over all ranks: the row of the item, or the first row of the batch."""


class CorpusWriteError(DaliPipesError, OSError):
    """Token files cannot be written: for example the disk is full or permission is denied."""
