"""Tests of rows made of documents, from the corpus to the batch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "corpus"))
