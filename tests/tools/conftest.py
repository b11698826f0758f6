"""Writers of corpus files and the list of samples are those of the corpus tests."""

import sys
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
sys.path += [str(CORPUS), str(CORPUS / "formats")]
