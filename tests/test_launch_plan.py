"""csrc/mps/launch_plan.h, compiled by itself: which kernel, which arguments, which grid; and the embedded sources."""

import os
import random
import struct
from pathlib import Path

import pytest
from faults.kernels import gemv_variants
from formats import TYPES, type_size
from plans import FAMILIES, load_embed

ROOT = Path(__file__).parent.parent
NAMES = {t.name: t for t in TYPES}
SOURCES = ("gemv", "dequantize", "rows", "tiles", "matmul", "transposed", "expert_gemv", "experts")


@pytest.fixture
def embed():
    return load_embed()


def test_names(plan_library):
    names = []
    while name := plan_library.name(len(names)):
        names.append(name.decode())
    dtypes = ("float", "half", "bfloat")
    shapes = [variant.suffix for variant in gemv_variants()]
    assert shapes[-1] == "plain" and shapes.count("plain") == 1
    ends = {f: ["", "_plain"] for f in FAMILIES} | {"routes": [""]}
    ends |= {f"rows{M}": ["_s8", "_s4", "_plain"] for M in (2, 3, 4)}
    ends["gemv"] = ends["expert_gemv"] = [f"_{shape}" for shape in shapes]
    assert names == [f"{f}_{t}_{d}{end}" for f in FAMILIES for t in NAMES for d in dtypes for end in ends[f]]


@pytest.mark.parametrize("family", ["gemv", "dequantize", "embedding"])
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_kernel(plan, family, quant_type):
    for dtype, name in enumerate(("float", "half", "bfloat")):
        shape = "_r4_s2_k1" if family == "gemv" else ""
        assert plan(family, quant_type, 5, 256, dtype=dtype).kernel == f"{family}_{quant_type.name}_{name}{shape}"


ALIGNMENT = {"Q4_K": 16, "Q5_K": 16, "IQ4_XS": 8}


@pytest.mark.parametrize("family", ["gemv", "dequantize", "embedding"])
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_weights_that_are_not_aligned_take_the_plain_kernel(plan, family, quant_type):
    alignment = ALIGNMENT.get(quant_type.name, 2)
    pitch = type_size(quant_type) * 8
    assert pitch % alignment == 0
    for offset in range(0, 33):
        for extra in (0, 1, 2, 4, 8, 16):
            kernel = plan(family, quant_type, 5, 256, offset=offset, row_bytes=pitch + extra).kernel
            wide = offset % alignment == 0 and extra % alignment == 0
            assert kernel.endswith("_plain") != wide, (offset, extra)


def test_gemv_arguments(plan):
    quant_type = NAMES["Q6_K"]
    p = plan("gemv", quant_type, 4097, 512, row_bytes=2**29 - 2, count=3, x_stride=2**32 + 5, extra=2)
    assert struct.unpack("<QQIIII", p.params) == (2**29 - 2, 2**32 + 5, 4097, 512, 2, 0)


def test_dequantize_and_embedding_arguments(plan):
    quant_type = NAMES["Q6_K"]
    assert struct.unpack("<QII", plan("dequantize", quant_type, 7, 512, row_bytes=2**33).params) == (2**33, 512, 0)
    p = plan("embedding", quant_type, 7, 512, count=9, extra=4)
    assert struct.unpack("<QIIII", p.params) == (420, 7, 512, 4, 0)


@pytest.mark.parametrize("N", [1, 2, 7, 8, 9, 127, 128, 511, 512, 2047, 2048, 4096, 8191, 8192, 248320])
@pytest.mark.parametrize("K", [32, 2048, 4096])
@pytest.mark.parametrize("M", [1, 8])
def test_gemv_grid(plan, N, K, M):
    """As many threadgroups as it takes, of the kernel's size; a row of x each in y."""
    variants = {variant.suffix: variant for variant in gemv_variants()}
    for dtype in range(3):
        for offset in (0, 1):
            p = plan("gemv", NAMES["Q4_0"], N, K, count=M, dtype=dtype, offset=offset)
            variant = variants[p.kernel.split("_", 4)[4]]
            assert variant.plain == bool(offset)
            assert p.threadgroup == (variant.threads, 1)
            assert p.grid[0] % variant.threads == 0 and p.grid[1] == M
            groups = p.grid[0] // variant.threads
            assert (groups - 1) * variant.outputs < N <= groups * variant.outputs


def test_gemv_shapes(plan_library):
    for i, variant in enumerate(gemv_variants()):
        assert plan_library.shape(i)[:3] == [variant.rows, variant.simdgroups, variant.splits]
        assert plan_library.shape_name(i).decode() == variant.suffix
        assert variant.simdgroups % variant.splits == 0 and variant.threads <= 1024
    assert not plan_library.shape(len(gemv_variants()))


@pytest.mark.parametrize(
    "N, K, usual, few",
    [
        (1536, 2048, "r8_s2_k2", "r4_s2_k2"),
        (1536, 2016, "r4_s2_k1", "r4_s2_k1"),
        (100_000, 4096, "r8_s2_k2", "r4_s2_k2"),
        (1536, 4096, "r8_s2_k2", "r4_s2_k2"),
        (1535, 4096, "r8_s4_k4", "r4_s2_k2"),
        (1, 4096, "r8_s4_k4", "r4_s2_k2"),
        (1535, 4064, "r8_s2_k2", "r4_s2_k2"),
        (1, 1024, "r4_s2_k1", "r4_s2_k1"),
    ],
)
def test_the_gemv_kernel_for_a_shape(plan_library, plan, N, K, usual, few):
    """For a GPU of 16 cores; the limits of N go with the cores, those of K don't."""
    for dtype in range(3):
        for quant_type in TYPES:
            wanted = few if quant_type.name in ("Q2_K", "Q3_K", "Q6_K") else usual
            assert plan("gemv", quant_type, N, K // 256 * 256, dtype=dtype).kernel.endswith(wanted) or K % 256
            assert plan("gemv", NAMES["Q4_0"], N, K, dtype=dtype).kernel.endswith(usual)
    for most_rows, wanted in ((8, usual), (4, few)):
        for cores in (1, 8, 32, 80):
            variant = gemv_variants()[plan_library.wanted(most_rows, -(-N * cores // 16), K, cores)].suffix
            assert variant == wanted or N * cores % 16, (cores, variant)


# ---- Tables of gemv kernels


@pytest.fixture
def tune(plan_library):
    """Adds an entry to the table; an empty one at first, and again behind the test."""
    plan_library.forget()
    yield plan_library.tune
    plan_library.forget()


def test_a_table_names_the_kernel_of_its_class_alone(plan, tune):
    assert tune(NAMES["Q4_0"], 1, 4096, 8191, 3)
    for N, K, tuned in [
        *((4096, 4096, True), (8191, 4096, True), (4096, 8160, True), (5000, 5024, True)),
        *((4095, 4096, False), (8192, 4096, False), (4096, 4064, False), (4096, 8192, False)),
    ]:
        for quant_type in ("Q4_0", "IQ4_NL"):
            for dtype in range(3):
                kernel = plan("gemv", NAMES[quant_type], N, K, dtype=dtype).kernel
                assert kernel.endswith("r4_s2_k1") == (tuned and quant_type == "Q4_0" and dtype == 1), (N, K, kernel)
    assert plan("linear", NAMES["Q4_0"], 4096, 4096).kernel == "gemv_Q4_0_half_r4_s2_k1"
    assert plan("linear", NAMES["Q4_0"], 4096, 4096, count=2).kernel == "rows2_Q4_0_half_s4"
    assert plan("gemv", NAMES["Q4_0"], 4096, 4096, offset=1).kernel.endswith("_plain")


def test_rows_by_experts_count_together(plan, tune):
    """Four rows of N = 1024 share the GPU as one of 4096."""
    tune(NAMES["Q4_0"], 1, 4096, 4096, 3)
    kernels = [plan("expert_gemv", NAMES["Q4_0"], 1024, 4096, count=rows, extra=64).kernel for rows in (3, 4, 7, 8)]
    assert kernels == [f"expert_gemv_Q4_0_half_{end}" for end in ("r8_s2_k2", "r4_s2_k1", "r4_s2_k1", "r8_s2_k2")]


def test_tables_of_many_entries(plan_library, tune):
    expected, draw = {}, random.Random(0)
    for _ in range(500):
        size = [2 ** draw.randrange(32) for _ in range(2)]
        key, variant = (draw.choice(TYPES), draw.randrange(3), *size), draw.randrange(4)
        assert bool(tune(*key, variant)) == (key not in expected)
        expected.setdefault(key, variant)
    assert len(expected) > 400
    for quant_type in TYPES:
        for dtype in range(3):
            for n in range(32):
                for k in range(32):
                    variant = expected.get((quant_type, dtype, 2**n, 2**k), -1)
                    assert plan_library.tuned(quant_type, dtype, 2**n, 2 * 2**k - 1) == variant


@pytest.mark.parametrize("K", [32, 256, 4096, 4352, 2**20])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_decode_grid(plan, K, rows):
    for p in (plan("dequantize", NAMES["Q4_0"], rows, K), plan("embedding", NAMES["Q4_0"], 5, K, count=rows)):
        assert p.grid == (K // 16, rows)
        x, y = p.threadgroup
        assert 1 <= x <= p.grid[0] and 1 <= y <= p.grid[1] and x * y <= 256
        assert x * y == 256 or x == p.grid[0] or y == 1, "as many threads as there is work for"
        assert (x + 1) * y > 256 or x == p.grid[0]


def test_limits(plan):
    quant_type = NAMES["Q4_0"]
    largest = (2**32 - 1) // 64 * 8
    assert plan("gemv", quant_type, largest, 32).grid[0] < 2**32
    with pytest.raises(OverflowError, match=rf"torch_qgemv.linear: N = {largest + 1} .*N = {largest + 1}, K = 32"):
        plan("gemv", quant_type, largest + 1, 32)
    with pytest.raises(OverflowError, match=r"linear: M = 9 is more than the 8 .*N = 5, K = 32"):
        plan("gemv", quant_type, 5, 32, count=9)
    widest = {"row_bytes": 2**29 - 1}
    assert plan("gemv", quant_type, 5, 2**29, **widest).kernel
    with pytest.raises(OverflowError, match=r"linear: bytes from row to row = 536870912 is more than the 536870911 "):
        plan("gemv", quant_type, 5, 2**29, row_bytes=2**29)
    with pytest.raises(OverflowError, match=r"K = 4294967296 is more than the 4294967295 .*N = 5, K = 4294967296"):
        plan("gemv", quant_type, 5, 2**32, **widest)
    for family in ("dequantize", "embedding"):
        assert plan(family, quant_type, 5, 2**32 - 32).kernel
        with pytest.raises(OverflowError, match=r"K = 4294967296 is more than the 4294967295 .*N = 5, K = 4294967296"):
            plan(family, quant_type, 5, 2**32)
    for family in ("dequantize", "embedding"):
        assert plan(family, quant_type, 2**32 - 1, 32).kernel
        with pytest.raises(OverflowError, match=f"torch_qgemv.{family}: N = 4294967296 is more"):
            plan(family, quant_type, 2**32, 32)
    with pytest.raises(OverflowError, match="number of indices = 4294967296"):
        plan("embedding", quant_type, 5, 32, count=2**32)


def test_x_has_to_be_aligned(plan_library):
    assert [plan_library.aligned(offset, 64) for offset in (0, 2, 8, 16, 24, 32)] == [1, 0, 0, 1, 0, 1]
    assert [plan_library.aligned(32, row) for row in (0, 2, 8, 16, 24, 32)] == [1, 0, 0, 1, 0, 1]


# ---- The embedded sources


def test_embedded_sources(plan_library, embed):
    for i, name in enumerate(SOURCES):
        text = plan_library.source(i).decode("ascii")
        assert text == embed.flatten(ROOT / f"metal/{name}.metal") + "\n"
        assert '#include "' not in text and "#pragma once" not in text
        assert text.count("struct Q4_K ") == 1, "each header once"
        lines = text.splitlines()
        where = lines.index("struct Q4_K : SuperBlockK4 {  // w = d * (6-bit scale) * q - dmin * (6-bit min)")
        marker = max(i for i in range(where) if lines[i].startswith("#line"))
        number, file = int(lines[marker].split()[1]) + where - marker - 1, lines[marker].split()[2].strip('"')
        assert (ROOT / file).read_text().splitlines()[number - 1] == lines[where]


def test_a_header_that_is_up_to_date_is_left_alone(embed, tmp_path):
    header = tmp_path / "made/metal_sources.inc"
    embed.write(header)
    os.utime(header, (1, 1))
    embed.write(header)
    assert header.stat().st_mtime == 1


def test_sources_are_plain_ascii(embed, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "METAL", tmp_path)
    (tmp_path / "a.metal").write_text('#include "b.h"\n', encoding="utf-8")
    (tmp_path / "b.h").write_text("// fine\n// 3 \u00b5s\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metal/b.h:2: Metal sources are plain ASCII, got '// 3 \u00b5s'"):
        embed.embedded()
