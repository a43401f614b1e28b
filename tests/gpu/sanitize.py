"""A sample of the CUDA families under compute-sanitizer.

    PYTHONPATH=<folder with kt>:tests compute-sanitizer --tool memcheck \
        --error-exitcode 9 python3 tests/gpu/sanitize.py [draws]

Also with `--tool racecheck`. The kernels are the random draws of test_gemm_kernels, fewer of them.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_name("test_gemm_kernels.py")


def main() -> None:
    """Runs the random kernels; an error of the sanitizer or a wrong result ends with a code."""
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    spec = importlib.util.spec_from_file_location("kernels", SOURCE)
    assert spec and spec.loader
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = kernels
    spec.loader.exec_module(kernels)
    kernels.DRAWS = dict.fromkeys(kernels.DRAWS, draws)
    kernels.NAMED = dict.fromkeys(kernels.NAMED, ())
    kernels.LARGER = kernels.gemm_cases.EDGES
    # The sanitizer and a pool of compiling processes do not get along.
    kernels.ProcessPoolExecutor = lambda *_, **__: ThreadPoolExecutor(4)
    with tempfile.TemporaryDirectory() as name:
        kernels.run_draws(Path(name))


if __name__ == "__main__":
    main()
