"""Tables of gemv kernels for the user's own GPU: measured by `tune`, kept in files, put in use by load_tuning alone."""

import dataclasses
import json
import os
import threading
from itertools import cycle
from unittest import mock

import pytest
import torch
from formats import TYPES, assert_linear_close, dequantized, random_packed, random_x
from test_bench import run_bench

import torch_qgemv
from torch_qgemv import bench, tuning
from torch_qgemv.__main__ import main
from torch_qgemv.bench import devices, tune
from torch_qgemv.bench.measure import Times

ops = torch.ops.torch_qgemv
VARIANTS = ops._gemv_variants()
Q4_K, Q6_K = TYPES[7], TYPES[9]
ENTRY = tuning.Entry("Q4_K", "float16", 32, 512, "r8_s4_k4")
BUILT_IN = "r4_s2_k1"  # for K < 2048


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of caches of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/torch_qgemv"


@pytest.fixture
def kernel(simulator):
    """Calls give the variant that multiplies one row of x; the result is checked."""

    def kernel(N=40, K=512, quant_type=Q4_K):
        packed, x = random_packed(quant_type, N, K), random_x((1, K), torch.half)
        simulator.clear()
        y = torch_qgemv.linear(x.to("mps"), packed.to("mps"), quant_type)
        (launch,) = simulator.dispatches()
        assert_linear_close(y, x, dequantized(packed, quant_type))
        return launch.kernel.removeprefix(f"gemv_{quant_type.name}_half_")

    yield kernel
    torch_qgemv.unload_tuning()


class LaunchClock:
    """Of a GPU on which a launch of a gemv kernel takes as many ns as its variant's next cost."""

    min_sample_ns = 1

    def __init__(self, simulator, **costs):
        self.simulator, self.costs = simulator, {name: cycle(values) for name, values in costs.items()}

    def start(self):
        self.simulator.clear()

    def stop(self):
        kernels = [launch.kernel.split("_", 4)[4] for launch in self.simulator.dispatches()]
        return float(sum(next(self.costs[kernel]) for kernel in kernels))


@pytest.fixture
def tune_by(simulator, monkeypatch):
    """Runs `tune`, on a device that isn't known as a simulated one, by a clock with these costs."""

    def tune_by(*arguments, **costs):
        mps = dataclasses.replace(devices.DEVICES["mps"], clock=lambda: LaunchClock(simulator, **costs))
        monkeypatch.setitem(devices.DEVICES, "mps", mps)
        monkeypatch.setattr(tune, "is_simulated", lambda name: False)
        quick = ["--types", "Q4_K", "--shapes", "512x40", "--seconds", "0", "--rotate", "1"]
        with mock.patch.object(bench, "MIN_ROTATE", 10**5):
            return main(["tune", *quick, *arguments])

    return tune_by


def costs(**others):
    return {name: [1000] for name in VARIANTS} | others


def table(*entries, **changes):
    return dataclasses.replace(tuning.measured_here(entries), **changes)


def written(tmp_path, *entries, **changes):
    path = tmp_path / "table.json"
    tuning.write_table(table(*entries, **changes), path)
    return path


# ---- The operators


@pytest.mark.parametrize("quant_type", [Q4_K, Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_right_result(variant, quant_type, mps):
    for N, K in ((1, 256), (37, 2304)):
        packed, x = random_packed(quant_type, N, K), random_x((1, K), torch.half)
        y = ops._linear_variant(x.to(mps), packed.to(mps), quant_type, variant)
        assert_linear_close(y, x, dequantized(packed, quant_type))


def test_the_variant_asked_for_is_launched(simulator):
    weight, x = random_packed(Q4_K, 5, 256).to("mps"), random_x((256,), torch.half).to("mps")
    simulator.clear()
    for variant in VARIANTS:
        assert ops._linear_variant(x, weight, Q4_K, variant).shape == (5,)
    assert [launch.kernel for launch in simulator.dispatches()] == [f"gemv_Q4_K_half_{name}" for name in VARIANTS]
    assert ops._linear_variant(x, weight[:0], Q4_K, BUILT_IN).shape == (0,)


def test_the_built_in_choice():
    assert ops._gemv_choice(Q4_K, 4096, 1024) == BUILT_IN
    assert ops._gemv_choice(Q4_K, 100_000, 4096) == "r8_s2_k2"
    assert ops._gemv_choice(Q6_K, 100_000, 4096) == "r4_s2_k2"
    with pytest.raises(ValueError, match="N and K must be positive, got 0 and 256"):
        ops._gemv_choice(Q4_K, 0, 256)
    with pytest.raises(ValueError, match="quant_type 0 is not a supported GGUF type"):
        ops._gemv_choice(0, 1, 256)


def test_wrong_arguments_are_refused(mps):
    weight, x = random_packed(Q4_K, 5, 256).to(mps), random_x((2, 256), torch.half).to(mps)
    odd = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=mps)[1:].view(weight.shape)
    for arguments, message in [
        ((x[:1], weight, Q4_K, "r1_s1_k1"), f"no variant 'r1_s1_k1'; there are {', '.join(VARIANTS)}"),
        ((x[:1], weight, Q4_K, "plain"), "no variant 'plain'"),
        ((x, weight, Q4_K, BUILT_IN), r"x must be one row of K = 256, got shape \[2, 256\]"),
        ((x[:1], odd, Q4_K, BUILT_IN), "start at multiples of 16 bytes"),
        ((x[:1, :32], weight, Q4_K, BUILT_IN), "x has K = 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops._linear_variant(*arguments)


def test_a_table_with_anything_wrong_is_refused_whole(kernel):
    good = [[Q4_K], ["float16"], [32], [512], [ENTRY.variant]]
    ops._use_tuning(*good)
    for index, value, message in [
        (0, [99], "quant_type 99 is not a supported GGUF type"),
        (1, ["float64"], "dtype must be float32, float16 or bfloat16, got 'float64'"),
        (2, [0], "N and K must be positive, got 0 and 512"),
        (3, [-1], "N and K must be positive, got 32 and -1"),
        (4, ["plain"], "there is no variant 'plain'"),
        (4, [], "lists must have one length, got 1, 1, 1, 1, 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops._use_tuning(*good[:index], value, *good[index + 1 :])
    with pytest.raises(ValueError, match="two entries for Q4_K, float16, N = 63, K = 600"):
        ops._use_tuning([Q4_K] * 2, ["float16"] * 2, [32, 63], [512, 600], VARIANTS[:2])
    assert kernel() == ENTRY.variant
    ops._use_tuning([], [], [], [], [])
    assert kernel() == BUILT_IN


# ---- load_tuning


def test_a_loaded_table_changes_the_kernel_of_its_class_and_no_other(kernel, tmp_path):
    path = written(tmp_path, ENTRY)
    assert kernel() == BUILT_IN
    assert torch_qgemv.load_tuning(path) == 1
    assert kernel() == kernel(32) == kernel(63, 768) == ENTRY.variant
    assert kernel(31) == kernel(64) == kernel(40, 256) == kernel(40, 1024) == kernel(quant_type=Q6_K) == BUILT_IN
    torch_qgemv.unload_tuning()
    assert kernel() == BUILT_IN


def test_a_table_is_replaced_by_the_next(kernel, tmp_path):
    torch_qgemv.load_tuning(written(tmp_path, ENTRY))
    assert torch_qgemv.load_tuning(written(tmp_path, dataclasses.replace(ENTRY, N=64, variant="r8_s2_k1"))) == 1
    assert kernel() == BUILT_IN and kernel(64) == "r8_s2_k1"
    assert torch_qgemv.load_tuning(str(written(tmp_path))) == 0
    assert kernel(64) == BUILT_IN


def test_nothing_is_loaded_that_was_not_asked_for(kernel, cache):
    tuning.write_table(table(ENTRY), tuning.default_path())
    assert kernel() == BUILT_IN
    assert torch_qgemv.load_tuning() == 1
    assert kernel() == ENTRY.variant


def test_a_missing_file_names_the_command(kernel, cache):
    with pytest.raises(FileNotFoundError, match=r"no tuning file .*torch_qgemv/tuning-.*python -m torch_qgemv tune"):
        torch_qgemv.load_tuning()


def test_products_run_while_tables_change(kernel, simulator, tmp_path):
    path = written(tmp_path, ENTRY)
    weight, x = random_packed(Q4_K, 40, 512).to("mps"), random_x((1, 512), torch.half).to("mps")
    stop = threading.Event()

    def change():
        while not stop.is_set():
            torch_qgemv.load_tuning(path)
            torch_qgemv.unload_tuning()

    thread = threading.Thread(target=change)
    simulator.clear()
    thread.start()
    for _ in range(100):
        torch_qgemv.linear(x, weight, Q4_K)
    stop.set()
    thread.join()
    kernels = {launch.kernel.removeprefix("gemv_Q4_K_half_") for launch in simulator.dispatches()}
    assert kernels <= {ENTRY.variant, BUILT_IN}
    assert kernel() == BUILT_IN


def assert_refused(text, message, path, kernel):
    """load_tuning says what is wrong with this text, and the table in use stays."""
    torch_qgemv.load_tuning(path)
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as refused:
        torch_qgemv.load_tuning(path)
    assert str(path) in str(refused.value) and "python -m torch_qgemv tune" in str(refused.value)
    assert kernel() == ENTRY.variant


@pytest.mark.parametrize("text", ["", '{"format": 1', "[" * 100_000, "\udcff\udcfe"])
def test_a_file_that_is_no_json(text, kernel, tmp_path):
    assert_refused(text, "is no tuning file: ", written(tmp_path, ENTRY), kernel)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"more": 1}, "the file must have chip, entries, .*, torch, got chip, entries, format, more"),
        ({"format": 2}, "its format is 2, but this torch_qgemv reads 1"),
        ({"format": True}, "its format is True"),
        ({"chip": None}, "chip must be a string, got None"),
        ({"entries": {}}, "entries must be a list, got {}"),
        ({"entries": [5]}, r"entries\[0\] must be an object, got int"),
        ({"entries": [{}]}, r"entries\[0\] must have .*, got nothing"),
        ({"entries": [dataclasses.asdict(ENTRY)] * 2}, "several entries for .*Q4_K"),
        ({"chip": "Apple M9"}, "was measured with GPU Apple M9, but here is simulated"),
        ({"torch": "1.0"}, r"was measured with torch 1\.0, but here is"),
        ({"package": "0.0.1"}, r"with torch_qgemv 0\.0\.1, but here is"),
    ],
)
def test_a_file_of_another_form_or_machine(changes, message, kernel, tmp_path):
    path = written(tmp_path, ENTRY)
    assert_refused(json.dumps(json.loads(path.read_text()) | changes), message, path, kernel)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"type": "Q9_9"}, r"entries\[1\] has the type 'Q9_9'; known are Q4_0"),
        ({"type": ["Q4_K"]}, r"has the type \['Q4_K'\]"),
        ({"dtype": "float64"}, "has the dtype 'float64'; known are float32"),
        ({"variant": "plain"}, f"has the variant 'plain'; known are {VARIANTS[0]}"),
        ({"N": 33}, r"entries\[1\]: N must be a power of two from 1 to 2147483648, got 33"),
        ({"K": 2**32}, "K must be .* got 4294967296"),
        ({"K": 0}, "K must be .* got 0"),
        ({"K": 512.0}, r"K must be .* got 512\.0"),
        ({"K": True}, "K must be .* got True"),
    ],
)
def test_an_entry_that_means_nothing_here(changes, message, kernel, tmp_path):
    path = written(tmp_path, ENTRY)
    entries = [dataclasses.asdict(ENTRY), dataclasses.asdict(ENTRY) | {"N": 64} | changes]
    assert_refused(json.dumps(json.loads(path.read_text()) | {"entries": entries}), message, path, kernel)


def test_without_mps_there_is_nothing_to_tune(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="load_tuning: torch finds no MPS device here"):
        torch_qgemv.load_tuning()
    torch_qgemv.unload_tuning()
    assert tuning.misfit(table(chip="Apple M9")) == "was measured with GPU Apple M9, but here is no MPS device"
    for arguments, message in [
        (["tune"], "--device mps: torch finds no MPS device here"),
        (["tune", "--show"], "--device mps: torch finds no MPS device here"),
        (["tune", "--device", "cpu"], "--device cpu: only mps has several kernels to choose from"),
        (["bench", "--tuning"], "--tuning is a choice of Metal kernels: it needs --device mps"),
    ]:
        with pytest.raises(SystemExit, match=message):
            main(arguments)


# ---- Files


def test_the_file_of_a_gpu_and_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "gpu_name", lambda: "Apple M2 Pro/Max")
    monkeypatch.setattr(torch, "__version__", "2.13.0+local")
    name = "torch_qgemv/tuning-Apple-M2-Pro-Max-torch-2.13.0+local.json"
    assert tuning.default_path() == tmp_path / "cache" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.default_path() == tmp_path / ".cache" / name


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = written(tmp_path, ENTRY)
    before = path.read_text()

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        written(tmp_path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_is_written_is_read_again(tmp_path):
    whole = table(ENTRY, tuning.Entry("IQ4_XS", "float32", 1, 2**31, VARIANTS[0]), chip="Apple \u2318", torch="9")
    tuning.write_table(whole, tmp_path / "new/folder/table.json")
    assert tuning.read_table(tmp_path / "new/folder/table.json") == whole


def test_show(simulator, tmp_path, capsys, cache):
    path = written(tmp_path, ENTRY)
    assert main(["tune", "--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{devices.SIMULATED}, torch {torch.__version__}" in shown and "entries: 1" in shown
    assert "Q4_K    float16   r8_s4_k4  K 512 to 1023, N 32 to 63" in shown and "\nfor this machine" in shown
    tuning.write_table(table(chip="Apple M9"), tuning.default_path())
    assert main(["tune", "--show"]) == 1
    assert "not for this machine: it was measured with GPU Apple M9" in capsys.readouterr().out
    path.write_text("{")
    with pytest.raises(SystemExit, match=r"--show: .*table\.json is no tuning file"):
        main(["tune", "--show", str(path)])
    with pytest.raises(SystemExit, match="--show: there is no tuning file"):
        main(["tune", "--show", str(tmp_path / "none")])


# ---- tune


def test_the_fastest_variant_is_found_written_and_loaded(tune_by, kernel, cache, capsys):
    assert tune_by(**costs(r8_s2_k2=[700, 710, 705])) == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("Q4_K"))
    assert row == ["Q4_K", "float16", BUILT_IN, "r8_s2_k2", "0.700", "2.0%", "r8_s2_k2", "512x40"]
    (file,) = cache.iterdir()
    assert f"written to {file}, entries: 1; torch_qgemv.load_tuning() puts it in use" in printed
    assert tuning.read_table(file) == table(dataclasses.replace(ENTRY, variant="r8_s2_k2"))
    assert kernel() == BUILT_IN
    assert torch_qgemv.load_tuning() == 1
    assert kernel() == "r8_s2_k2"


@pytest.mark.parametrize("slower", [[990], [900, 1100, 1100]], ids=["by little", "by chance"])
def test_what_may_be_noise_is_not_kept(tune_by, tmp_path, capsys, slower):
    path = tmp_path / "out.json"
    assert tune_by("--output", str(path), **costs(r8_s2_k1=slower)) == 0
    assert tuning.read_table(path).entries == ()
    printed = capsys.readouterr().out
    assert "built-in  512x40" in printed and f"torch_qgemv.load_tuning({str(path)!r})" in printed


def test_every_type_dtype_and_class_has_a_line(tune_by, tmp_path, capsys):
    path = tmp_path / "out.json"
    shapes = "512x40,512x33,512x9"
    tune_by("--output", str(path), "--types", "Q4_K,Q6_K", "--shapes", shapes, **costs(r8_s4_k4=[500]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("Q")] == ["512x40,512x33", "512x9"] * 2
    assert {(entry.type, entry.N, entry.K) for entry in tuning.read_table(path).entries} == {
        (name, N, 512) for name in ("Q4_K", "Q6_K") for N in (32, 8)
    }


def test_a_variant_has_to_be_faster_at_every_shape_of_a_class():
    def measured(built_in, **us):
        return tune.Measured(built_in, {name: Times(values) for name, values in us.items()})

    both = [measured("a", a=[10, 10], b=[5, 5], c=[8, 8]), measured("a", a=[10, 10], b=[11, 11], c=[9, 9])]
    assert tune.judge(both) == tune.Verdict("c", 0.9, tune.MIN_NOISE)
    assert tune.judge(both).kept
    assert tune.judge(both[:1]) == tune.Verdict("b", 0.5, tune.MIN_NOISE)
    other = [both[0], measured("c", a=[10, 10], b=[11, 11], c=[9, 9])]
    assert tune.judge(other).best == "c" and not tune.judge(other).kept
    noisy = [measured("a", a=[10, 12, 12], b=[9, 9, 9])]
    assert tune.judge(noisy).noise == pytest.approx(0.2) and not tune.judge(noisy).kept


def test_a_kernel_that_is_wrong_stops_it(tune_by, cache, monkeypatch):
    monkeypatch.setattr(tune, "linear_error", lambda y, x, matrix: 1.5)
    with pytest.raises(SystemExit, match=r"r8_s2_k1 multiplies Q4_K 512x40 wrongly: .*selftest --device mps"):
        tune_by(**costs())
    assert not cache.exists()


def test_a_simulated_device_is_rehearsed_and_not_timed(simulator, cache, tmp_path, capsys):
    simulator.clear()
    path = tmp_path / "out.json"
    with mock.patch.object(bench, "MIN_ROTATE", 10**5):
        assert main(["tune", "--types", "Q4_K", "--shapes", "512x40", "--rotate", "1", "--output", str(path)]) == 0
    assert [launch.kernel for launch in simulator.dispatches()] == [f"gemv_Q4_K_half_{name}" for name in VARIANTS]
    printed = capsys.readouterr().out
    assert "DRY RUN" in printed and "no file is written" in printed
    assert not path.exists() and not cache.exists()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--dtype", "fp16,fp64"], "fp64: choose from bf16, fp16, fp32"),
        (["--types", "Q9_9"], "Q9_9: choose from Q4_0"),
        (["--output", "."], "--output . is a folder; a file is needed"),
        (["--shapes", "100x3", "--types", "Q4_0"], "--shapes 100x3: K is no multiple of the 32 weights"),
    ],
)
def test_wrong_options_stop_before_anything_is_measured(simulator, arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert text in f"{stopped.value.code} {capsys.readouterr().err}"


# ---- bench --tuning


def test_the_benchmark_says_which_table_it_uses(simulator, kernel, tmp_path, capsys):
    path = written(tmp_path, ENTRY)
    arguments = ["--device", "mps", "--types", "Q4_K", "--shapes", "512x40", "--m", "1"]
    simulator.clear()
    result = run_bench(tmp_path, *arguments, "--tuning", str(path))
    assert result["settings"]["tuning"] == {"file": str(path), "entries": 1}
    kernels = {launch.kernel for launch in simulator.dispatches() if launch.kernel.startswith("gemv")}
    assert kernels == {f"gemv_Q4_K_half_{ENTRY.variant}"}
    assert f"kernels for one row of x by {path}, entries: 1" in capsys.readouterr().out
    assert kernel() == BUILT_IN
    assert run_bench(tmp_path, *arguments)["settings"]["tuning"] is None
    assert "kernels for one row" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--tuning: there is no tuning file"):
        run_bench(tmp_path, *arguments, "--tuning")
