"""Every error the package raises for something its user can mend.

DaliPipesError
├── ConfigError             a setting is unknown, missing, or does not go with another (also a ValueError)
├── CorpusError             the data is not what it should be (also a ValueError)
│   ├── CorpusFormatError   unknown, unsupported or damaged file format; index and data disagree
│   ├── CorpusReadError     a file vanished, shrank or could not be read (also an OSError)
│   └── TokenRangeError     an id is negative, or at or above `vocab_size`
├── CorpusWriteError        token files could not be written: no space, no permission (also an OSError)
├── StateError              a saved state does not fit this corpus or configuration (also a ValueError)
├── LoaderClosedError       the loader was closed, or this iterator was superseded (also a RuntimeError)
└── BackendError            a package, a compiler or a device that was asked for is not there (also a RuntimeError)

A message says what was found (file, position, value), what was expected, and what to do.
"""

EMPTY_PATH = "an empty path; name a file, folder or glob ('.' is the current folder)"
NO_WEIGHTS = "list only paths, each once: weighted mixtures of sources are not supported yet"


class DaliPipesError(Exception):
    """Base class of every error raised on purpose by this package."""


class ConfigError(DaliPipesError, ValueError):
    """A setting is unknown, missing, out of range, or does not go with another."""

    problems: tuple[tuple[str, str], ...] = ()
    """For a configuration: each wrong setting and why; "" if several settings contradict each other."""


class CorpusError(DaliPipesError, ValueError):
    """The corpus is not what it should be."""


class CorpusFormatError(CorpusError):
    """A file's format is unknown, unsupported or damaged, or an index disagrees with its data."""


class CorpusReadError(CorpusError, OSError):
    """A file is missing, unreadable, or gave fewer bytes than it held when it was opened."""


class TokenRangeError(CorpusError):
    """A token id is negative, or at or above `vocab_size`."""


class StateError(DaliPipesError, ValueError):
    """A saved state does not fit this corpus or this configuration."""


class LoaderClosedError(DaliPipesError, RuntimeError):
    """The loader was closed, or this iterator was superseded by a newer one."""


class BackendError(DaliPipesError, RuntimeError):
    """A package, a compiler or a device that was asked for is not there."""


class CorpusWriteError(DaliPipesError, OSError):
    """Token files could not be written."""
