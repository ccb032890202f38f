"""The benchmarks are scripts, so their folder is found the way Python finds it when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
