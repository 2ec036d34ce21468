"""The roofline: what the benchmark counts and reports, and the kernels that it measures a GPU with."""

import json
from unittest import mock

import pytest
import torch
from formats import TYPES, dequantized, random_x
from test_bench import run_bench

from torch_qgemv import bench
from torch_qgemv.__main__ import main
from torch_qgemv.bench import devices, measure, roofline
from torch_qgemv.testing import linear_error, random_packed

Q4_K = next(quant_type for quant_type in TYPES if quant_type.name == "Q4_K")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(quant_type="Q4_K", K=4096, N=4096, M=1, **us):
    """A case as the benchmark writes it, of so many microseconds for each entry and 50 for the read."""
    packed = N * K // 256 * 144
    entries = {}
    for name, took in us.items():
        nbytes = packed + 2 * M * (K + N)
        entries[name] = {
            "group": name,
            "us_min": took,
            "gb_per_s": took and nbytes / took / 1e3,
            "percent_of_read": took and 5000 / took,
            "intensity": roofline.intensity(M, N, K, nbytes),
        }
    read = None if None in us.values() else 50.0
    return {"quant_type": quant_type, "K": K, "N": N, "M": M, "packed_bytes": packed, "read_us_min": read,
            "entries": entries}  # fmt: skip


def result(*cases, dtype="fp16", device="mps"):
    return {"settings": {"dtype": dtype, "device": device}, "cases": list(cases)}


# What is counted


def test_intensity():
    packed = 4096 * 16 * 144
    assert roofline.note_intensity(4096, 4096, packed, rows=2) == pytest.approx(1.28, abs=0.001)
    assert roofline.intensity(1, 4096, 4096, packed + 2 * 8192) == pytest.approx(3.55, abs=0.005)
    assert roofline.intensity(8, 4096, 4096, packed) == 8 * roofline.intensity(1, 4096, 4096, packed)


def test_the_roof_is_the_lower_of_memory_and_arithmetic():
    one, many = case(torch_qgemv=62.5), case(M=512, torch_qgemv=10_000.0)
    whole = result(one, many)
    roofline.complete(whole, roofline.nominal("Apple M2 Pro", None, None), 5000.0)
    measured = one["packed_bytes"] / 50e3
    assert whole["roofline"]["read_gb_per_s"] == pytest.approx(measured)
    assert whole["roofline"]["ridge_flop_per_byte"] == pytest.approx(5000 / measured)
    assert whole["roofline"]["nominal"]["gb_per_s"] == 200
    memory, arithmetic = one["entries"]["torch_qgemv"], many["entries"]["torch_qgemv"]
    assert memory["percent_of_roof"] == pytest.approx(100 * memory["gb_per_s"] / measured)
    assert arithmetic["gflop_per_s"] == pytest.approx(2 * 512 * 4096**2 / 1e7)
    assert arithmetic["percent_of_roof"] == pytest.approx(arithmetic["gflop_per_s"] / 50)


def test_nominal_figures():
    assert roofline.nominal("Apple M4 Pro", None, None).gb_per_s == 273
    assert roofline.nominal("Apple M9", None, None) == roofline.Nominal(None, None, "unknown chip")
    assert roofline.nominal(None, 100.0, 3.0) == roofline.Nominal(100, 3, "the command line")
    assert roofline.nominal("Apple M4 Pro", None, 9.0) == roofline.Nominal(273, 9, "the command line")
    for chip in ("Apple M3 Max", "Apple M4 Max"):  # two kinds of memory
        assert chip not in roofline.CHIPS


def test_the_report_answers_the_note():
    whole = result(case(published=63.0, torch_qgemv=52.0))
    roofline.complete(whole, roofline.nominal("Apple M2 Pro", None, None), 6800.0)
    text = "\n".join(roofline.summary(whole))
    rows = {line[:40].strip(): line[40:].split() for line in text.splitlines()}
    assert rows["the note (M2 Pro)"] == ["63.0", "152.3", "76%", "1.28"]
    assert rows["the published mapping, here"] == ["63.0", "150.1", "75%", "79%", "3.55"]
    assert rows["torch_qgemv, here"] == ["52.0", "181.8", "91%", "96%", "3.55"]
    assert rows["the aim"] == ["90%"]
    assert "1.28 with 2, 1.88 with 4, 2.46 with 8 outputs" in text
    assert "ridge at 36.0 FLOP/byte" in text
    assert "nominal: 200 GB/s (Apple's press release of 2023-01-17)" in text


@pytest.mark.parametrize("other", [{"K": 8192}, {"M": 2}, {"quant_type": "Q5_K"}])
def test_the_note_is_about_one_case_only(other):
    whole = result(case(torch_qgemv=52.0, **other))
    roofline.complete(whole, roofline.nominal(None, None, None), 6800.0)
    text = "\n".join(roofline.summary(whole))
    assert "the note" not in text and "nominal" not in text


def test_without_a_baseline_the_report_says_so():
    whole = result(case(torch_qgemv=52.0))
    roofline.complete(whole, roofline.nominal(None, None, None), 6800.0)
    rows = {line[:40].strip(): line[40:] for line in roofline.summary(whole)}
    assert "--baseline published" in rows["the published mapping, here"]
    assert rows["torch_qgemv, here"].split() == ["52.0", "181.8", "-", "96%", "3.55"]


def test_the_roofline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    run_bench(tmp_path, "--types", "Q4_K,Q8_0", "--shapes", "512x48", "--m", "1,4", "--roofline", str(path),
              "--peak-bandwidth", "100", "--peak-flops", "1")  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")


# On the CPU


def test_a_run_on_the_cpu_has_a_roofline(tmp_path, capsys):
    whole = run_bench(tmp_path, "--types", "Q4_K", "--shapes", "512x48", "--m", "1", "--peak-bandwidth", "50")
    roof = whole["roofline"]
    assert roof["fma_gflop_per_s"] > 1
    assert roof["ridge_flop_per_byte"] == pytest.approx(roof["fma_gflop_per_s"] / roof["read_gb_per_s"])
    assert roof["nominal"] == {"gb_per_s": 50, "tflop_per_s": None, "source": "the command line"}
    entry = whole["cases"][0]["entries"]["torch_qgemv"]
    assert entry["percent_of_nominal"] == pytest.approx(2 * entry["gb_per_s"])
    printed = capsys.readouterr().out
    assert "ridge at" in printed and "nominal: 50 GB/s" in printed
    assert "the note" not in printed


def test_more_passes_are_more_operations():
    sums = torch.full((3,), torch.nan)
    few, many = (torch.ops.torch_qgemv._fma_rate(sums, passes) for passes in (1, 5))
    assert sums.isfinite().all()
    assert many == 5 * few > 0


def test_named_shapes(tmp_path):
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    shapes = parser.parse_args(["--shapes", "qwen3.5-9b"]).shapes
    assert (4096, 4096) in shapes and (4096, 248320) in shapes and len(set(shapes)) == 7


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--device", "cpu", "--baseline", "published"], "--baseline published is a Metal kernel"),
        (["--device", "mps"], "--device mps: torch finds no MPS device here"),
    ],
)
def test_what_a_device_cannot_do_is_told_first(arguments, text):
    with mock.patch.object(torch.backends.mps, "is_available", lambda: False), pytest.raises(SystemExit, match=text):
        main(["bench", *arguments])


# On MPS


def test_the_read_reads_every_byte(mps):
    for size in (1, 15, 16, 17, 64, 4097, 100_003):
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        for width in (1, 2, 32):
            before = torch.ops.torch_qgemv._read(data.to(mps), width).cpu()
            for position in {0, size // 3, size // 2, max(0, size - 18), size - 1}:
                other = data.clone()
                other[position] ^= 1
                after = torch.ops.torch_qgemv._read(other.to(mps), width).cpu()
                assert not torch.equal(before, after), f"byte {position} of {size} is not read"


def test_multiply_adds_are_made(mps):
    sums = torch.full((300,), torch.nan, device=mps)
    assert torch.ops.torch_qgemv._fma_rate(sums, 2) == 2 * 128 * 2 * 300
    chains = (torch.arange(300) % 64)[:, None] + torch.arange(16.0)
    for _ in range(2 * 8):
        chains = chains.double() * 0.999 + 0.001
    torch.testing.assert_close(sums.cpu(), chains.sum(1).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, N", [(256, 1), (1280, 37), (2048, 6)])
def test_the_published_kernel_is_right(mps, dtype, K, N):
    packed = random_packed(Q4_K, N, K)
    x = random_x((1, K), dtype)
    y = torch.ops.torch_qgemv._published(x.to(mps), packed.to(mps))
    assert y.shape == (1, N) and y.dtype == dtype
    assert linear_error(y, x, dequantized(packed, Q4_K)) <= 1


def test_wrong_arguments_are_refused(mps):
    packed, x = random_packed(Q4_K, 5, 256).to(mps), torch.zeros(2, 256, device=mps)
    with pytest.raises(ValueError, match=r"_published: x must be one row of K = 256"):
        torch.ops.torch_qgemv._published(x, packed)
    with pytest.raises(ValueError, match="vectors_per_thread must be positive, got 0"):
        torch.ops.torch_qgemv._read(packed, 0)
    with pytest.raises(ValueError, match="bytes must start at a multiple of 16"):
        torch.ops.torch_qgemv._read(packed.flatten()[1:])
    with pytest.raises(ValueError, match="must be contiguous and of float32"):
        torch.ops.torch_qgemv._fma_rate(x.half(), 1)
    with pytest.raises(ValueError, match="got 512 sums and 0 passes"):
        torch.ops.torch_qgemv._fma_rate(x, 0)


def test_a_simulated_device_is_rehearsed_and_not_timed(simulator, tmp_path, capsys):
    simulator.clear()
    path = tmp_path / "bench.json"
    arguments = ["--device", "mps", "--baseline", "published", "--types", "Q4_K,Q8_0", "--shapes", "512x48"]
    with mock.patch.object(bench, "MIN_ROTATE", 10**6):
        main(["bench", *arguments, "--m", "1,3", "--rotate", "1", "--json", str(path)])
    whole = json.loads(path.read_text())
    assert whole["dry_run"] is True
    assert whole["machine"]["gpu"] == devices.SIMULATED
    assert whole["settings"]["dtype"] == "fp16"
    assert [list(each["entries"]) for each in whole["cases"]] == [
        ["torch_qgemv", *["published"] * (quant_type == "Q4_K" and M == 1), "F.linear float16", "F.linear float32"]
        for quant_type in ("Q4_K", "Q8_0")
        for M in (1, 3)
    ]
    for each in whole["cases"]:
        assert each["read_us_min"] is None and each["ratios"] == {} and not each["noisy"]
        for name, entry in each["entries"].items():
            assert entry["us_min"] is entry["gb_per_s"] is entry["percent_of_read"] is None
            assert entry["relative_error"] < (1e-6 if name == "torch_qgemv" else 1e-3)
    assert whole["roofline"]["read_gb_per_s"] is whole["roofline"]["fma_gflop_per_s"] is None
    kernels = {dispatch.kernel for dispatch in simulator.dispatches()}
    assert {"read", "fma_rate", "published_Q4_K_half"} <= kernels
    printed = capsys.readouterr().out
    assert "DRY RUN" in printed and " us" in printed


def test_a_rehearsal_of_the_note_has_no_times():
    whole = result(case(published=None, torch_qgemv=None))
    roofline.complete(whole, roofline.nominal("Apple M2 Pro", None, None), None)
    text = "\n".join(roofline.summary(whole))
    assert text.count("no times on a simulated device") == 2
    assert "measured" not in text


def test_nothing_is_drawn_of_a_rehearsal(simulator, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="a simulated device has no times"):
        main(["bench", "--device", "mps", "--roofline", str(tmp_path / "x.png")])


def test_the_gpu_is_timed_by_its_own_events(monkeypatch):
    """The clock of mps: what lies between two events, with everything before them finished."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def elapsed_time(self, other):
            assert other is not self
            return 2.5  # ms

    monkeypatch.setattr(torch.mps.event, "Event", Event)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: log.append("synchronize"))
    clock = measure.MpsClock()
    clock.start()
    log.append("call")
    assert clock.stop() == 2_500_000
    assert log == ["synchronize", "record", "call", "record", "synchronize"]
