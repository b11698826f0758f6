"""The benchmarks are scripts, not a package: tests find their modules as the scripts themselves do, in their folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
