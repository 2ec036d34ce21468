"""Compiles all kernels of linear for the simulated device into its cache: `python tests/metal_sim/warm.py`.

conftest.py runs it in CI beside the tests, which then find most kernels compiled.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from msl_check.opencl import format_names, metal_sources

from metal_sim.kernels import compile_metal

SOURCES = ("gemv", "dequantize", "rows", "tiles", "matmul", "transposed", "expert_gemv", "experts")
TYPES = ("float", "half", "bfloat")


def main() -> None:
    sources = metal_sources()
    for source in SOURCES:
        for quant_type in format_names():
            for dtype in TYPES:
                compile_metal(sources[source], {"QGEMV_FORMAT": quant_type, "QGEMV_TYPE": dtype})


if __name__ == "__main__":
    main()
