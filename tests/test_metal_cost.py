"""What the gemv kernels' hot loops cost is what the committed table says, so that no change of it goes unnoticed."""

import os

import metal_cost
import msl_check
import pytest
from metal_cost import llvm
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


@pytest.mark.parametrize("quant_type", format_names())
def test_the_table_holds(compiler, quant_type):
    head, *rows = metal_cost.TABLE.read_text().splitlines()
    if head != f"compiler: {compiler}":
        pytest.skip(f"the table was made by another compiler: {head}")
    made = metal_cost.table([quant_type]).splitlines()
    committed = [row for row in rows if row.startswith(f"gemv_{quant_type}_")]
    assert [row for row in made if row.startswith("gemv_")] == committed, "run `python tests/metal_cost --write`"


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
