"""What the kernels' hot loops cost is what the committed table says, so that no change of it goes unnoticed."""

import os

import metal_cost
import msl_check
import pytest
from metal_cost import amd, llvm
from msl_check.opencl import format_names


@pytest.fixture
def compiler():
    try:
        msl_check.libclang()
        return metal_cost.compiler()
    except (msl_check.Unavailable, metal_cost.Unavailable) as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def committed(compiler):
    head, *lines = metal_cost.TABLE.read_text().splitlines()
    if head != f"compiler: {compiler}":
        pytest.skip(f"the table was made by another compiler: {head}")
    return lines


@pytest.mark.parametrize("quant_type", format_names())
def test_the_table_holds(committed, quant_type):
    def rows(lines):
        return [line for line in lines if f"_{quant_type}_" in line]

    made = rows(metal_cost.table([quant_type]).splitlines())
    assert made and made == rows(committed), "run `python tests/metal_cost --write`"


# Most cycles a weight with 16-bit x, for 2, 4 and 8 rows of x.
SEVERAL_ROWS = {
    "Q4_K": (4.2, 6.3, 10.4),
    "Q6_K": (5.5, 7.6, 11.6),
    "Q8_0": (4.2, 6.2, 10.3),
    "IQ4_XS": (5.0, 7.0, 11.0),
}


@pytest.mark.parametrize("quant_type", SEVERAL_ROWS)
def test_a_weight_is_decoded_once_for_several_rows(committed, quant_type):
    at = 1 + metal_cost.COLUMNS.index("cycles")
    cycles = {line.split()[0]: float(line.split()[at]) for line in committed if "_half" in line}
    for family, M, most in zip(("rows2", "rows4", "tiles"), (2, 4, 8), SEVERAL_ROWS[quant_type], strict=True):
        kernel = f"{family}_{quant_type}_half" + ("_s4" if family != "tiles" else "")
        assert M < cycles[kernel] <= most
    # What a weight costs beside its multiply-adds, as part of the matrix kernels' loops. In that of 64 rows half of
    # the lanes decode; the table counts them all.
    decoding = cycles[f"rows2_{quant_type}_half_s4"] - 2
    assert decoding <= 0.10 * cycles[f"matmul32_{quant_type}_half"]
    assert decoding <= 0.052 * (cycles[f"matmul64_{quant_type}_half"] - decoding)


# Cycles per weight that a kernel of 4 rows and one of 8 may take, by the model.
MOST = {
    **{"Q4_K": (2.6, 2.2), "Q5_K": (3.6, 3.2), "Q6_K": (3.5, 3.5), "Q8_0": (3.4, 3.4), "IQ4_XS": (2.0, 2.0)},
    **{"Q4_0": (2.1, 2.0), "Q4_1": (2.1, 2.0), "Q5_0": (3.0, 2.9), "Q5_1": (3.0, 2.9), "IQ4_NL": (2.0, 2.0)},
    **{"Q2_K": (2.2, 2.1), "Q3_K": (3.5, 3.4)},
}


@pytest.mark.parametrize("quant_type", format_names())
def test_the_table_keeps_what_the_kernels_are_made_for(quant_type):
    table = [row.split() for row in metal_cost.TABLE.read_text().splitlines() if row.startswith("gemv_")]
    rows = {row[0]: dict(zip(metal_cost.COLUMNS, map(float, row[1:]), strict=True)) for row in table}
    usual, wide = (rows[f"gemv_{quant_type}_half_{shape}"] for shape in ("r4_s2_k1", "r8_s2_k1"))
    assert usual["cycles"] <= MOST[quant_type][0] and wide["cycles"] <= MOST[quant_type][1]
    assert usual["convert"] == wide["convert"] == 0
    if quant_type == "Q4_K":
        assert max(usual["load"], wide["load"]) <= 0.2
        assert max(usual["gfx1030"], wide["gfx1030"]) <= 3.3


LOOP = """
  br label %2

2:                                                ; preds = %2, %1
  %3 = phi i32 [ 0, %1 ], [ %20, %2 ]
  %4 = load <4 x i32>, ptr addrspace(1) %0, align 16
  %5 = and <2 x i32> %4, splat (i32 15)
  %6 = shl nuw i32 %3, 16
  %7 = lshr i32 %3, 4
  %8 = uitofp i32 %7 to float
  %9 = tail call noundef float @llvm.fma.f32(float %8, float %8, float 0.0)
  %10 = fadd float %9, %8
  %11 = fpext half %10 to float
  %20 = add nuw i32 %3, 1
  %21 = icmp ult i32 %20, %1
  br i1 %21, label %2, label %22, !llvm.loop !5

22:                                               ; preds = %2
  %23 = mul i32 %3, %3
  ret void
"""


def test_a_loop_is_counted():
    counts = llvm.count(llvm.hot_loop(LOOP))
    assert counts == {"load": 1, "int": 4, "shift": 1, "convert": 1, "float": 2}


def test_a_loop_of_several_blocks_is_counted_whole():
    body = LOOP.replace("  %20 =", "  br i1 %11, label %12, label %13\n\n12:\n  %14 = fadd float %9, %9\n"
                        "  br label %13\n\n13:\n  %20 =")  # fmt: skip
    assert llvm.count(llvm.hot_loop(body))["float"] == 3


def test_a_loop_inside_is_refused():
    body = LOOP.replace("  %20 =", "  br label %12\n\n12:\n  %14 = fadd float %9, %9\n"
                        "  br i1 %14, label %12, label %13\n\n13:\n  %20 =")  # fmt: skip
    with pytest.raises(ValueError, match="another one inside, at %12"):
        llvm.hot_loop(body)


@pytest.mark.parametrize("line", ["%1 = call float @sinf(float %0)", "%1 = atomicrmw add ptr %0, i32 1 monotonic"])
def test_an_unknown_instruction_is_refused(line):
    with pytest.raises(ValueError):
        llvm.count([f"  {line}"])


def test_vector_operations_of_an_amd_gpu():
    body = "_Z1f:\n\tv_add_f32 v0, v1, v2\n.LBB0_1:\n{}\ts_cbranch_execnz .LBB0_1\n\tv_mov_b32 v0, 0\n.Lfunc_end0:\n"
    loop = "\tv_fma_f32 v0, v1, v2, v3\n\ts_waitcnt vmcnt(0)\n.LBB0_2:\n\tv_and_b32 v0, 15, v0\n"
    assert amd.vector_operations(body.format(loop)) == {"_Z1f": 2}
    with pytest.raises(ValueError, match="no loop"):
        amd.vector_operations("_Z1f:\n\tv_add_f32 v0, v1, v2\n.Lfunc_end0:\n")
