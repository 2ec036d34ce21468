"""Faults that people make, each with the test that catches it."""

from dataclasses import dataclass
from pathlib import Path

import metal_sim

from . import sandbox
from .sandbox import Outcome, Trouble

GEMV, LAUNCHER, PIPELINES = "metal/gemv.h", "csrc/mps/launcher.mm", "csrc/mps/pipelines.mm"
ENCODING, COMPILE, TENSORS = "csrc/mps/dispatch.h", "csrc/mps/compile.mm", "csrc/mps/tensors.h"
DISPATCH = "[encoder dispatchThreads:metal_size(p->grid) threadsPerThreadgroup:metal_size(p->threadgroup)];"


@dataclass(frozen=True)
class Fault:
    """`old`, which is there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    test: str  # in tests/

    def apply(self, source: str) -> str:
        if (count := source.count(self.old)) != 1:
            raise Trouble(f"{self.file} has {count} times, not once: {self.old}")
        return source.replace(self.old, self.new)


def every_shape(quant_type: str) -> str:
    return f"test_mps.py::test_every_kernel_in_every_shape[mps-sim-{quant_type}-float]"


def several_rows(quant_type: str) -> str:
    return f"test_mps_matmul.py::test_every_kernel[mps-sim-{quant_type}-half]"


FUSED = "test_fused_linear.py::test_{}"
ROWS, TILES, MATMUL = "metal/rows.h", "metal/tiles.h", "metal/matmul.h"
LOOP = "for (uint step = 0; step < side.steps; ++step) {"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FIRST_BARRIER = f"{LOOP}\n    {BARRIER}"
FLOAT = several_rows("Q4_0").replace("half", "float")
LONG_SUMS = "test_mps_matmul.py::test_sums_over_long_rows[mps-sim-Q8_0-4096]"

RUNS = "test_mps.py::test_the_kernel_that_runs[mps-sim-Q4_0-float]"
IN_PLACE = "test_mps.py::test_buffers_are_bound_in_place[mps-sim]"
THOUSAND = "test_mps.py::test_a_thousand_calls_share_an_encoder_and_leave_nothing[mps-sim]"
ONE_ROW = "test_mps.py::test_one_row_is_one_launch[mps-sim]"
BY_ROWS = "test_mps_matmul.py::test_one_launch_whatever_the_rows[mps-sim-{}]"
OTHER_LANES = "test_mps_matmul.py::test_tiles_run_only_where_the_order_of_the_lanes_is_known[1-matmul32]"
EXPERTS = "test_experts_mps.py::test_rows_of_any_distribution[mps-sim-{}]"
NO_EXPERT = "test_experts.py::test_an_id_that_is_no_expert[mps-sim]"
GRADIENT = "test_mps_matmul.py::test_every_transposed_kernel[mps-sim-Q4_0-half]"
MADE_ONCE = "test_mps.py::test_a_pipeline_is_made_once[mps-sim]"

FAULTS = [
    Fault(
        "a buffer's offset dropped",
        ENCODING,
        "return {buffer_of(t), offset_of(t)};",
        "return {buffer_of(t), 0};",
        IN_PLACE,
    ),
    Fault(
        "buffers swapped",
        LAUNCHER,
        "{bind(weight), bind(x), bias_or_any, bind(y)}",
        "{bind(x), bind(weight), bias_or_any, bind(y)}",
        IN_PLACE,
    ),
    Fault(
        "row stride of the weight dropped",
        TENSORS,
        "uint64_t(weight.stride(0))};",
        "uint64_t(weight.size(1))};",
        "test_linear.py::test_views_of_weight[mps-sim-Q4_K]",
    ),
    Fault(
        "grid rounded down",
        "csrc/mps/launch_plan.h",
        "(uint64_t(w.N) + shape.outputs() - 1) / shape.outputs()",
        "uint64_t(w.N) / shape.outputs()",
        ONE_ROW,
    ),
    Fault("no clamp of the tail's loads", GEMV, "min(r, last - first)", "r", every_shape("Q4_0")),
    Fault("no bound of the stores", GEMV, "lane < rows && first + lane < p.N", "lane < rows", every_shape("Q4_0")),
    Fault("every lane stores", GEMV, "lane < rows && first + lane < p.N", "first + lane < p.N", every_shape("Q4_0")),
    Fault("wrong bias index", GEMV, "row.term(first + lane)", "row.term(lane)", every_shape("Q4_0")),
    Fault("rows: x stride dropped", ROWS, "x + m * p.x_stride", "x", several_rows("Q4_0")),
    Fault("rows: lanes not added", ROWS, "sum += simd_shuffle_xor(sum, 4);", "", several_rows("Q4_0")),
    Fault("rows: no barrier before the sums", ROWS, BARRIER, "", several_rows("Q4_0")),
    Fault("rows: no clamp of the tail's loads", ROWS, "min(r, last - first)", "r", several_rows("Q4_0")),
    Fault("tiles: no clamp of x", "metal/bias.h", "min(m, count - 1)", "m", several_rows("Q4_0")),
    Fault("tiles: x behind the end of K", TILES, "there ? v[k] : 0.0f", "v[k]", several_rows("Q4_0")),
    Fault("tiles: products lost", TILES, "if (i % 2 == 1) take_products();", "", BY_ROWS.format(8)),
    Fault("tiles whatever the lanes' order", "csrc/mps/device_check.mm", "lane == 1.0f", "true", OTHER_LANES),
    Fault("matmul: no barrier before a step", MATMUL, FIRST_BARRIER, LOOP, several_rows("Q4_0")),
    Fault("matmul: a row of x too many", MATMUL, "m < rows.count && n", "n", several_rows("Q4_0")),
    Fault(
        "matmul: a sum never moved",
        MATMUL,
        "  }\n  products.take_products",
        "  }\n  if (false) products.take_products",
        FLOAT,
    ),
    Fault("matmul: sums never apart", MATMUL, "step % 4 == 3", "false", LONG_SUMS),
    Fault(
        "transposed: weights behind the end of N",
        MATMUL,
        "min(32 * step + thread_index % 32, N - 1)",
        "ulong(32 * step + thread_index % 32)",
        GRADIENT,
    ),
    Fault(
        "transposed: quads out of order",
        MATMUL,
        "P::quad(column % piece_size / 4)",
        "column % piece_size / 4 * 4",
        GRADIENT.replace("Q4_0", "Q6_K"),
    ),
    Fault(
        "a gradient's last columns not zero",
        TENSORS,
        "padded.narrow(1, 0, N)",
        "padded.fill_(1).narrow(1, 0, N)",
        GRADIENT,
    ),
    Fault("high bits of Q5_K pieces", "metal/decode8.h", "(f << 7)", "(f << 6)", several_rows("Q5_K")),
    Fault("offset of Q8_0 pieces", "metal/decode8.h", "-float(S::code_bias)", "-127.0f", several_rows("Q8_0")),
    Fault(
        "no barrier behind the table of IQ4_XS",
        "metal/lanes/iq4.h",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        every_shape("IQ4_XS"),
    ),
    Fault(
        "scales of Q4_K unpacked wrongly",
        "metal/lanes/q4_k.h",
        "six = last ? 0x000f000fu : 0x003f003fu;",
        "six = 0x003f003fu;",
        every_shape("Q4_K"),
    ),
    Fault(
        "half subnormals flushed to zero",
        "metal/storage.h",
        "return float(as_type<half>(ushort(n)));",
        "return n < 1024u ? 0.0f : float(as_type<half>(ushort(n)));",
        every_shape("IQ4_XS"),
    ),
    Fault(
        "commit in every call",
        ENCODING,
        DISPATCH,
        f"{DISPATCH} stream->synchronize(at::mps::SyncType::COMMIT);",
        THOUSAND,
    ),
    Fault("an object leaked in every call", ENCODING, DISPATCH, f"{DISPATCH} [NSMutableDictionary new];", THOUSAND),
    Fault(
        "the compile options leaked",
        COMPILE,
        "[[MTLCompileOptions new] autorelease]",
        "[MTLCompileOptions new]",
        MADE_ONCE,
    ),
    Fault("the Metal function leaked", COMPILE, "[function release];", "", MADE_ONCE),
    Fault(
        "math mode not set",
        COMPILE,
        "if ([options respondsToSelector:@selector(setMathMode:)])",
        "return;\n  if ([options respondsToSelector:@selector(setMathMode:)])",
        RUNS,
    ),
    Fault(
        "fast math on an older macOS",
        COMPILE,
        "options.fastMathEnabled = NO;",
        "options.fastMathEnabled = YES;",
        "test_mps.py::test_an_older_macos_turns_fast_math_off",
    ),
    Fault(
        "pipelines not kept",
        PIPELINES,
        "kept.store(state, std::memory_order_release);",
        "",
        MADE_ONCE,
    ),
    Fault(
        "an index that is no row read all the same",
        "metal/dequantize.metal",
        "index >= long(p.N)",
        "index > long(p.N)",
        "test_mps.py::test_an_index_that_is_no_row_gives_nan[mps-sim-dtype0]",
    ),
    Fault("experts: an id below 0", "metal/routes.h", "id < 0 || ", "", NO_EXPERT),
    Fault("experts: rows of none get numbers", "metal/routes.h", "? 0.0f : NAN", "? 0.0f : 0.0f", NO_EXPERT),
    Fault(
        "experts: a tile too few",
        "metal/experts.metal",
        "end / p.tile_rows + min(expert + 1, end)",
        "end / p.tile_rows + min(expert, end)",
        EXPERTS.format(0),
    ),
    Fault(
        "experts: memory for too few tiles",
        "csrc/mps/experts_plan.h",
        "std::min(experts.count + 1, rows)",
        "std::min(experts.count, rows)",
        "test_experts_mps.py::test_as_many_tiles_as_there_can_be[mps-sim-1-3]",
    ),
    Fault(
        "experts: only the first one's alignment",
        "csrc/mps/experts_plan.h",
        "w.offset |= experts.bytes;",
        "",
        "test_experts.py::test_views_of_weight[mps-sim]",
    ),
    Fault(
        "experts: a row of x for each row of y",
        "csrc/mps/experts.mm",
        "ids.numel() / rows.size(0)",
        "1",
        "test_experts.py::test_one_expert_a_row_or_several[mps-sim-x_shape3-ids_shape3-int32]",
    ),
    Fault(
        "fused: the fourth weight read as the third",
        "metal/fused.metal",
        "(i == 2 ? third : fourth)",
        "(i == 2 ? third : third)",
        FUSED.format("a_product_for_each_weight[mps-sim]"),
    ),
    Fault(
        "fused: threadgroups of the largest kernel alone",
        "csrc/mps/fused_plan.h",
        "shape.rows * (plan.kernel.simdgroups / shape.splits)",
        "shape.outputs()",
        FUSED.format("kernels_of_different_shapes_share_a_launch[mps-sim]"),
    ),
    Fault(
        "fused: a case too few in the library's key",
        "csrc/mps/fused_plan.h",
        "std::copy(cases.begin(), cases.end(), plan.kernel.cases.begin())",
        "std::copy(cases.begin(), cases.end() - (cases.size() > 3), plan.kernel.cases.begin())",
        FUSED.format("a_product_for_each_weight[mps-sim]"),
    ),
    Fault(
        "fused: a bias bound to the weight before",
        LAUNCHER,
        "buffers[fused_weights + 1 + i] = bind(product.bias.tensor)",
        "buffers[fused_weights + i] = bind(product.bias.tensor)",
        FUSED.format("nothing_is_copied[mps-sim]"),
    ),
]


def attempt(fault: Fault, folder: Path, usual: Path) -> Outcome:
    """usual: the library built from the unbroken sources."""
    sandbox.copy_sources(folder)
    sandbox.change(folder, fault.file, fault.apply)
    try:
        launcher = sandbox.build_launcher(folder)
    except metal_sim.CompileError as error:
        raise Trouble(f"the launcher does not compile: {error}") from None
    if launcher == usual:
        raise Trouble("the library built is the usual one")
    outcome = sandbox.pytest_outcome(folder, f"tests/{fault.test}", launcher=launcher)
    if fault.file.startswith("metal/") and "does not compile" in outcome.by:
        raise Trouble(outcome.by)
    return outcome


def unbroken(folder: Path) -> Outcome:
    """What has to pass where nothing is broken."""
    tests = sorted({f"tests/{fault.test}" for fault in FAULTS})
    return sandbox.pytest_outcome(folder, *tests, launcher=sandbox.build_launcher(folder))
