"""What does compiling cost, and what makes it compile again? `csa2 bench compile`, with its results in the repository.

    python benchmarks/compile_time.py                    # a compact choice of cases, tiny widths, on CPU
    python benchmarks/compile_time.py --device cuda      # released shapes, one GPU, under four minutes
    python benchmarks/compile_time.py --full             # every case
    python benchmarks/compile_time.py --compare OLD.json # exit code 1 if it grew
    python benchmarks/compile_time.py --show benchmarks/results/cpu-compile-time.json

Takes the options of `csa2 bench compile`. Unless they say otherwise it writes
benchmarks/results/<device>-compile-time.json and draws docs/images/compile-time-<device>.png.
"""

import json
import sys
from pathlib import Path

import torch
from timing import REPOSITORY, provenance, results_path

from csa2_compiled.cli_bench import bench


def main(arguments: list[str]) -> None:
    """Run the command, then add the machine and the commit to its JSON."""
    # --device=cuda is --device cuda
    arguments = [word for text in arguments for word in (text.split("=", 1) if text.startswith("--") else [text])]
    on_cuda = "cuda" in arguments
    if "--show" in arguments or "--help" in arguments or (on_cuda and not torch.cuda.is_available()):
        bench(["compile", *arguments])  # which ends the process
    device = torch.device("cuda" if on_cuda else "cpu")
    path = results_path(device, "compile-time")
    outputs = {
        "--json": path,
        "--chart": REPOSITORY / "docs" / "images" / f"compile-time-{path.name.split('-')[0]}.png",
    }
    for option, default in outputs.items():
        if option not in arguments:
            arguments = [*arguments, option, str(default)]
    written = Path(arguments[arguments.index("--json") + 1])
    before = written.stat().st_mtime_ns if written.exists() else None
    code = bench(["compile", *arguments], standalone_mode=False)
    if not written.exists() or written.stat().st_mtime_ns == before:
        sys.exit(code or 1)  # it measured nothing, and said why
    result = json.loads(written.read_text())
    written.write_text(json.dumps({**provenance(device), **result}, indent=1) + "\n")
    sys.exit(code or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
