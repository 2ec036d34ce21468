"""The simulated device as a launcher sees it: metal_sim/selftest/selftest.mm makes each mistake when asked to."""

import gc
import threading
from pathlib import Path

import metal_sim
import pytest
import torch

metal_sim.install_or_skip()

SELFTEST = Path(metal_sim.__file__).parent / "selftest"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    source = (SELFTEST / "selftest.metal").read_text()
    library = metal_sim.build(
        [SELFTEST / "selftest.mm"], embedded={"selftest_source.inc": f'R"metal({source})metal"\n'}
    )
    metal_sim.load(library)


@pytest.fixture(autouse=True)
def cleared():
    metal_sim.clear()


def scale(x, fault=""):
    return torch.ops.metal_sim_selftest.scale(x, fault)


def xs(n=100):
    return torch.arange(float(n), device="mps")


# ---- A launcher without a mistake ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 64, 65, 1000])
@pytest.mark.parametrize("way", ["", "groups", "profiled"])
def test_values(n, way):
    assert torch.equal(scale(xs(n), way).cpu(), 3 * torch.arange(float(n)) + 7)


def test_views():
    x = xs()
    assert torch.equal(scale(x[10:60:2]).cpu(), 3 * torch.arange(10.0, 60, 2) + 7)


def test_a_command_queue_of_its_own():
    before = metal_sim.counters()["live"]
    assert torch.equal(scale(xs(5), "own queue").cpu(), 3 * torch.arange(5.0) + 7)
    assert scale(xs(5), "own queue, not committed").isnan().all(), "only a commit runs it"
    counters = metal_sim.counters()
    assert counters["dispatches"] == counters["encoders"] == counters["commits"] == 0, "those of PyTorch's stream"
    for name in ("MTLCommandQueue", "MTLCommandBuffer", "MTLComputeCommandEncoder"):
        assert counters["live"].get(name, 0) == before.get(name, 0)


def test_named_function_constant():
    assert scale(xs(3), "negate").tolist() == [-7, -10, -13]


def test_dispatches_are_recorded():
    x = xs()[7:]
    y = scale(x)
    [d] = metal_sim.dispatches()
    assert (d.kernel, d.grid, d.groups, d.threads) == ("scale", (93, 1, 1), (2, 1, 1), (64, 1, 1))
    assert d.buffers[0] == metal_sim.Binding(x.untyped_storage().data_ptr(), 28, 372)
    assert d.buffers[1] == metal_sim.Binding(y.untyped_storage().data_ptr(), 0, 372)
    assert d.bytes == {2: b"\x5d\0\0\0\1\0\0\0"}
    metal_sim.clear()
    assert metal_sim.dispatches() == []


def test_a_thousand_calls_make_one_encoder_and_nothing_else():
    x = xs()
    scale(x, "commit")  # ends the encoder there was
    scale(x)
    gc.collect()  # what earlier tests' exceptions held
    metal_sim.clear()
    before = metal_sim.counters()["live"]
    for _ in range(1000):
        scale(x)
    counters = metal_sim.counters()
    assert counters["live"] == before
    assert (counters["encoders"], counters["commits"], counters["dispatches"]) == (0, 0, 1000)


def test_four_threads():
    wrong = []

    def work(n):
        x = xs(n)
        for way in ["", "groups", "negate", f"new pipeline {n}", ""] * 10:
            y = scale(x, way).cpu()
            expected = 3 * torch.arange(float(n)) + 7
            if not torch.equal(y, -expected if way == "negate" else expected):
                wrong.append((n, way))

    threads = [threading.Thread(target=work, args=(n,)) for n in (10, 100, 33, 64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(metal_sim.dispatches()) == 200


def test_an_older_macos_lacks_math_mode():
    with metal_sim.without_selectors("setMathMode:"):
        assert scale(xs(2), "older macOS").tolist() == [7, 10]  # it takes fastMathEnabled = NO
        with pytest.raises(RuntimeError, match="safe math mode"):
            scale(xs(2), "no math mode")


# ---- Mistakes ------------------------------------------------------------------------------------------------------

RAISES = {
    "no math mode": "compiled without the safe math mode",
    "fast math": "compiled without the safe math mode",
    "old language": "MTLLanguageVersion3_1",
    "missing constant": r"function constant bias \(index 0\) has no value",
    "constant type": "function constant bias is of type uint, its value of type int",
    "unspecialised": r"of a library with function constants \(bias, negate\)",
    "kernel name": "no kernel named scales",
    "over-released function": r"\[MTLFunction release\] is sent to an object already freed",
    "unbound buffer": "buffer 0, which is not bound\n    at metal/selftest.metal:20",
    "short bytes": r"past the end of buffer 2 \(4 bytes\)\n    at metal/selftest.metal:20",
    "too many threads": "threadgroups of 2048 threads, more than the 1024",
    "too much memory": "32784 bytes, more than the 32768",
    "end encoding": "endEncoding: the encoder is PyTorch's",
    "no such selector": r"\[MTLComputeCommandEncoder performNothing\] is not simulated",
    "used after commit": "already freed",
    "nested dispatch": "a deadlock on macOS",
    "outside the queue": r"commandEncoder\(\) is called outside the stream's queue",
    "encoder outside the queue": "the encoder is used outside the stream's queue",
    "own queue, not ended": "a command buffer is committed before endEncoding",
    "own queue, used after its end": "the encoder is used after its end",
    "own queue, waits uncommitted": "waitUntilCompleted before commit",
    "own queue, committed twice": "a command buffer is committed twice",
    "no pool": "NSString is autoreleased outside every @autoreleasepool",
}


@pytest.mark.parametrize("fault", RAISES)
def test_mistake_raises(fault):
    with pytest.raises(RuntimeError, match=RAISES[fault]):
        scale(xs(), fault)
    assert scale(xs(2)).tolist() == [7, 10]  # and the next call is as good as ever


def test_bindings_do_not_outlive_their_call():
    """On PyTorch's shared encoder, what is bound may be anyone's."""
    scale(xs())
    with pytest.raises(RuntimeError, match="buffer 0, which is not bound"):
        scale(xs(), "unbound buffer")
    with pytest.raises(RuntimeError, match="performNothing"):
        scale(xs(), "no such selector")
    with pytest.raises(RuntimeError, match="buffer 0, which is not bound"):
        scale(xs(), "unbound buffer")


def test_an_exception_in_a_block_leaves_no_pool():
    scale(xs())
    before = metal_sim.counters()["live"].get("NSAutoreleasePool", 0)
    with pytest.raises(RuntimeError, match="performNothing"):
        scale(xs(), "no such selector")
    assert metal_sim.counters()["live"].get("NSAutoreleasePool", 0) == before


def test_dropped_offset():
    x = xs()[7:]
    y = scale(x, "dropped offset")
    assert y[0].item() == 7  # x[0]'s result
    assert metal_sim.dispatches()[0].buffers[0].offset == 0


@pytest.mark.parametrize("fault", ["commit", "commit of the buffer"])
def test_commit_inside(fault):
    scale(xs(), fault)
    assert metal_sim.counters()["commits"] == 1
    scale(xs())
    assert metal_sim.counters()["encoders"] >= 1


@pytest.mark.parametrize("fault, leaked", [("leaked function", "MTLFunction"), ("leaked options", "MTLCompileOptions")])
def test_leaked_object(fault, leaked):
    scale(xs(), "no mistake")
    before = metal_sim.counters()["live"]
    scale(xs(), fault)
    after = metal_sim.counters()["live"]
    assert after.get(leaked, 0) == before.get(leaked, 0) + 1


# ---- The build -----------------------------------------------------------------------------------------------------


def test_a_source_that_does_not_compile(tmp_path):
    (tmp_path / "bad.mm").write_text("#import <Metal/Metal.h>\nvoid f(id<MTLBuffer> b) { [b size]; }\n")
    with pytest.raises(metal_sim.CompileError, match=r"bad.mm:2:\d+: error: .*'-size' not found"):
        metal_sim.build([tmp_path / "bad.mm"])


def test_a_missing_compiler_is_told_in_one_line(monkeypatch):
    from metal_sim import toolchain

    monkeypatch.setenv("METAL_SIM_CLANG", "no-such-clang")
    toolchain.clang.cache_clear()
    with pytest.raises(metal_sim.Unavailable, match=r"^METAL_SIM_CLANG=no-such-clang is not a program$"):
        toolchain.clang()
    monkeypatch.undo()
    toolchain.clang.cache_clear()
