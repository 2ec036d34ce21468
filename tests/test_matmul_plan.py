"""csrc/mps/matmul_plan.h: the launches of several rows of x, and of gradients."""

import struct

import pytest
from formats import TYPES

NAMES = {t.name: t for t in TYPES}

# {M: family, and what a threadgroup has: outputs, rows of x, threads}
FAMILY_OF_ROWS = {
    **{1: ("gemv", 8, 1, 64), 2: ("rows2", 16, 2, 128), 3: ("rows3", 16, 3, 128), 4: ("rows4", 16, 4, 128)},
    **dict.fromkeys((5, 6, 7, 8), ("tiles", 32, 8, 64)),
    **dict.fromkeys((9, 31, 32), ("matmul32", 64, 32, 64)),
    **dict.fromkeys((33, 64, 65, 1000), ("matmul64", 64, 64, 128)),
}


@pytest.mark.parametrize("M", FAMILY_OF_ROWS)
@pytest.mark.parametrize("N", [1, 8, 9, 64, 65, 4096])
def test_linear_by_rows_of_x(plan, plan_library, M, N):
    family, outputs, rows, threads = FAMILY_OF_ROWS[M]
    for operator in ("linear", "linear of unknown lanes"):
        if operator != "linear" and family == "tiles":
            family, outputs, rows, threads = FAMILY_OF_ROWS[32]
        p = plan(operator, NAMES["Q6_K"], N, 512, count=M, x_stride=600, extra=2)
        shape = "_r4_s2_k1" if family == "gemv" else "_s4" if family.startswith("rows") else ""
        assert p.kernel == f"{family}_Q6_K_half{shape}" and p.threadgroup == (threads, 1)
        groups = [-(-N // outputs) * threads, -(-M // rows)]
        if family.startswith("matmul"):  # rows of x first
            groups = [-(-M // rows) * threads, -(-N // outputs)]
        assert p.grid == tuple(groups)
        assert struct.unpack("<QQIIII", p.params)[:5] == (420, 600, N, 512, 2)
        assert M == 1 or struct.unpack("<QQIIII", p.params)[5] == M
    assert plan_library.needs_order(M) == (5 <= M <= 8)


@pytest.mark.parametrize("N, K, simdgroups", [(1023, 4096, 8), (1024, 4096, 4), (1023, 4064, 4), (1, 2**20, 8)])
@pytest.mark.parametrize("M", [2, 3, 4])
def test_how_many_simdgroups_share_the_rows(plan, M, N, K, simdgroups):
    p = plan("linear", NAMES["Q4_0"], N, K, count=M)
    assert p.kernel == f"rows{M}_Q4_0_half_s{simdgroups}"
    assert p.threadgroup == (32 * simdgroups, 1) and p.grid == (-(-N // 16) * 32 * simdgroups, 1)
    p = plan("linear", NAMES["Q4_0"], N, K, count=M, offset=1)
    assert p.kernel == f"rows{M}_Q4_0_half_plain" and p.threadgroup == (128, 1)


@pytest.mark.parametrize("M, rows", [(1, 32), (32, 32), (33, 64), (100, 64)])
def test_transposed_by_rows_of_grad_y(plan, M, rows):
    p = plan("linear_transposed", NAMES["Q4_0"], 7, 96, count=M, x_stride=32, offset=1)
    assert p.kernel == f"transposed{rows}_Q4_0_half_plain" and p.threadgroup == (2 * rows, 1)
    assert p.grid == (-(-M // rows) * 2 * rows, 2)
    assert struct.unpack("<QQIIII", p.params) == (54, 32, 7, 96, 0, M)


def test_columns_of_grad_y(plan_library):
    assert [plan_library.columns(N) for N in (1, 31, 32, 33, 64)] == [32, 32, 32, 64, 64]


def test_limits_of_several_rows(plan):
    quant_type = NAMES["Q4_0"]
    for M, outputs, threads in ((2, 16, 128), (4, 16, 128), (8, 32, 64)):
        largest = (2**32 - 1) // threads * outputs
        assert plan("linear", quant_type, largest, 32, count=M).grid[0] < 2**32
        with pytest.raises(OverflowError, match=f"linear: N = {largest + 1} is more"):
            plan("linear", quant_type, largest + 1, 32, count=M)
    with pytest.raises(OverflowError, match=r"linear: bytes from row to row = 536870912 is more than the 536870911 "):
        plan("linear", quant_type, 5, 2**29, row_bytes=2**29, count=2)
    most = (2**32 - 1) // 128 * 64
    assert plan("linear", quant_type, 2**32 - 1, 32, count=most).grid[0] < 2**32
    for operator in ("linear", "linear_transposed"):
        with pytest.raises(OverflowError, match=f"torch_qgemv.{operator}: M = {most + 1} is more"):
            plan(operator, quant_type, 5, 32, count=most + 1)
        for size in ({"N": 2**32, "K": 32}, {"N": 5, "K": 2**32}):
            with pytest.raises(OverflowError, match=f"torch_qgemv.{operator}: [NK] = 4294967296 is more"):
                plan(operator, quant_type, **size, count=40)
