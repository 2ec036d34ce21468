"""The benchmark: what it counts, compares and refuses. Times themselves are not judged."""

import json
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from formats import TYPES, block_size, random_x, type_size

from torch_qgemv import bench
from torch_qgemv.__main__ import main
from torch_qgemv.bench import ggml, measure, memory, report
from torch_qgemv.bench.measure import Problem, relative_errors, time_in_turn

BUILT_GGML = Path(__file__).parent.parent / "build"
MB = 10**6
ISAS = torch.ops.torch_qgemv._cpu_isas()


def run_bench(tmp_path, *arguments, peer="none"):
    """The JSON of a short run, over weights of 1 MB instead of 64."""
    path = tmp_path / "bench.json"
    quick = ["--seconds", "0.001", "--rotate", "1", "--peer", str(peer), "--json", str(path)]
    with mock.patch.object(bench, "MIN_ROTATE", MB):
        assert main(["bench", *quick, *arguments]) == 0
    return json.loads(path.read_text())


class FakePeer:
    """A ggml without AVX-512 that multiplies by means of torch."""

    name = "ggml"
    features: ClassVar = {"AVX2": "1", "FMA": "1", "AVX512": "0"}
    refusal = ggml.Ggml.refusal

    def __init__(self, folder, threads):
        pass

    def describe(self):
        return {"version": "0", "commit": "none", "features": self.features}

    def contestants(self, problem, copies, huge):
        for name, slowness in (("ggml slow", 3), ("ggml fast", 1)):
            yield FakeWeights(name, problem, copies, slowness)


class FakeWeights:
    group, dtype = "ggml", torch.float32

    def __init__(self, name, problem, copies, slowness):
        self.name, self.weight_bytes = name, problem.packed.nbytes
        self._copies, self._work = copies, torch.ones(slowness * 100_000)

    def takes(self, M):
        return M == 1 or self.name != "ggml fast"

    def calls(self, x):
        return [partial(torch.sum, self._work)] * self._copies

    def difference(self, x, tokens, exact):
        return exact / 4


# What is measured


def test_json_tells_of_every_contestant(tmp_path, capsys):
    result = run_bench(tmp_path, "--types", "Q4_K,Q8_0", "--shapes", "512x48", "--m", "1,3")
    assert [(case["quant_type"], case["K"], case["N"], case["M"]) for case in result["cases"]] == [
        (name, 512, 48, M) for name in ("Q4_K", "Q8_0") for M in (1, 3)
    ]
    assert result["settings"]["threads"] == 1
    assert result["settings"]["isa"] == ISAS[0]
    assert result["machine"]["torch"] == torch.__version__
    for case in result["cases"]:
        # 16-bit activations; rounded y; float32 sums.
        bounds = {"torch_qgemv": (1e-6, 5e-5), "F.linear bfloat16": (1e-4, 1e-2), "F.linear float32": (1e-9, 2e-6)}
        assert case["entries"].keys() == bounds.keys()
        for name, (low, high) in bounds.items():
            entry = case["entries"][name]
            assert low < entry["relative_error"] < high, name
            assert 0 < entry["us_min"] <= entry["us_median"]
            assert entry["percent_of_read"] == pytest.approx(100 * case["read_us_min"] / entry["us_min"])
            assert entry["intensity"] == pytest.approx(2 * case["M"] * 512 * 48 / entry["bytes"])
            assert entry["percent_of_nominal"] is None
        assert 0 < case["read_us_min"] <= case["read_us_median"]
        assert case["ratios"].keys() == case["best"].keys() == bounds.keys() - {"torch_qgemv"}
    assert result["dry_run"] is False
    printed = capsys.readouterr().out
    assert printed.count("512x48") == 4
    assert ISAS[0] in printed


@pytest.mark.parametrize("dtype, bytes_each", [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_bytes_are_those_of_packed_weight_x_and_y(tmp_path, dtype, bytes_each):
    (case,) = run_bench(tmp_path, "--types", "Q6_K", "--shapes", "768x40", "--m", "5", "--dtype", dtype)["cases"]
    packed = 40 * 768 // 256 * 210
    assert case["packed_bytes"] == packed
    assert case["copies"] * packed >= MB > (case["copies"] - 1) * packed
    elements = 5 * (768 + 40)
    assert case["entries"]["torch_qgemv"]["bytes"] == packed + elements * bytes_each
    assert case["entries"]["F.linear float32"]["bytes"] == (768 * 40 + elements) * 4
    for entry in case["entries"].values():
        assert entry["gb_per_s"] == pytest.approx(entry["bytes"] / entry["us_min"] / 1000)


def test_fp32_x_is_measured_at_fp32_grade(tmp_path):
    (case,) = run_bench(tmp_path, "--types", "Q4_K", "--shapes", "512x48", "--m", "1", "--dtype", "fp32")["cases"]
    assert case["entries"]["torch_qgemv"]["relative_error"] < 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_can_be_chosen(tmp_path, monkeypatch, isa):
    used = set()
    linear = torch.ops.torch_qgemv._linear_isa
    monkeypatch.setattr(torch.ops.torch_qgemv, "_linear_isa", lambda *a: used.add(a[-1]) or linear(*a))
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1", "--isa", isa)
    assert result["settings"]["isa"] == isa
    assert used == {isa}


def test_the_thread_count_is_set_and_put_back(tmp_path, monkeypatch):
    before, during = torch.get_num_threads(), []
    monkeypatch.setattr(
        bench, "relative_errors", lambda *a: during.append(torch.get_num_threads()) or relative_errors(*a)
    )
    run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1", "--threads", str(before + 1))
    assert during == [before + 1]
    assert torch.get_num_threads() == before


def test_the_read_reads_every_byte():
    for size in (1, 63, 64, 511, 512, 4097, 200_003):
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        sum_before = torch.ops.torch_qgemv._read(data)
        for position in {0, size // 3, size // 2, max(0, size - 70), size - 2, size - 1} - {-1}:
            data[position] ^= 1
            assert torch.ops.torch_qgemv._read(data) != sum_before, f"byte {position} of {size} is not read"
            data[position] ^= 1


class FakeClock:
    """Of a device on which a call takes as many ns as `cost` says, and starting and stopping 1000."""

    def __init__(self, log, cost, min_sample_ns):
        self.log, self.cost, self.min_sample_ns, self.samples = log, cost, min_sample_ns, []

    def start(self):
        self.begin = len(self.log)

    def stop(self):
        self.samples.append(self.log[self.begin :])
        return 1000 + sum(self.cost[name] for name, _ in self.samples[-1])


def test_entries_take_turns_on_all_their_copies():
    log, sizes, cost = [], {"a": 3, "b": 2}, {"a": 10, "b": 4000}
    calls = {name: [partial(log.append, (name, copy)) for copy in range(size)] for name, size in sizes.items()}
    clock = FakeClock(log, cost, min_sample_ns=100_000)
    times = time_in_turn(calls, seconds=0, clock=clock)
    rounds = len(times["a"].us)
    assert rounds == len(times["b"].us) == measure.MIN_ROUNDS
    for sample in clock.samples:
        assert len({name for name, _ in sample}) == 1
    for name, size in sizes.items():
        used = [copy for entry, copy in log if entry == name]
        assert used == [i % size for i in range(len(used))]
        # A sample is long enough for what is not the calls not to count.
        assert min(times[name].us) == pytest.approx(cost[name] / 1e3, rel=0.03)
        assert len(clock.samples) < 2 * (rounds + 2 + measure.CALIBRATIONS)


def test_a_weight_repeats_its_rows_and_is_finite():
    for quant_type in TYPES:
        problem = Problem.random(quant_type, 512, 300, "cpu")
        assert problem.packed.shape == (300, 512 // block_size(quant_type) * type_size(quant_type))
        assert problem.matrix.isfinite().all()
        assert torch.equal(problem.packed[256:], problem.packed[:44])


def test_copies_are_contiguous_and_aligned():
    rows = torch.arange(7 * 210, dtype=torch.int32).reshape(7, 210)
    copies = memory.repeat(rows, 12, 3, huge=False)
    assert len({copy.data_ptr() for copy in copies}) == 3
    for copy in copies:
        assert torch.equal(copy, torch.cat([rows, rows[:5]]))
        assert copy.is_contiguous() and copy.storage_offset() % 256 == 0


def test_relative_error_is_the_size_of_the_difference():
    matrix, x = random_x((32, 64)), random_x((7, 64), seed=1)
    weights = FakeWeights("fake", Problem.random(TYPES[0], 64, 32, "cpu"), 1, 1)
    assert list(relative_errors([weights], x, matrix)) == pytest.approx([0.25])


def test_without_options_every_type_meets_every_size():
    args = main_arguments()
    cases = bench.list_cases(args.types, args.shapes, args.m)
    assert {quant_type for quant_type, _, _ in cases} == set(TYPES)
    for (_, K, N), tokens in cases.items():
        assert tokens == ((1, 2, 4, 8, 32, 128, 512) if (K, N) == (4096, 4096) else (1,))
    assert {(K, N) for _, K, N in cases} == {(4096, 4096), *bench.MODEL_SHAPES}


def main_arguments(*arguments):
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_weights_rotate_over_at_least_64_mb():
    assert main_arguments("--rotate", "1").rotate == 64_000_000
    assert main_arguments("--rotate", "100").rotate == 100_000_000
    assert main_arguments().rotate >= 64_000_000


# The peer


def test_no_ratio_to_a_ggml_that_lacks_an_instruction_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.PEERS, "ggml", FakePeer)
    monkeypatch.setitem(ggml.NEEDED_FEATURES, ISAS[0], ("AVX2", "AVX512", "AVX512_VNNI"))
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1", peer="build")
    (case,) = result["cases"]
    assert case["ratios"]["ggml"] is None
    assert "AVX512, AVX512_VNNI" in result["refusals"]["ggml"]
    assert result["peers"]["ggml"]["features"] == FakePeer.features
    printed = capsys.readouterr().out
    assert "refused" in printed
    assert "! no ratio to ggml: this ggml lacks AVX512, AVX512_VNNI" in printed


def test_the_ratio_is_to_the_fastest_path_of_the_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.PEERS, "ggml", FakePeer)
    monkeypatch.setitem(ggml.NEEDED_FEATURES, ISAS[0], ("AVX2",))
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1,2", peer="build")
    assert result["refusals"] == {}
    one, two = result["cases"]
    assert one["best"]["ggml"] == min(("ggml fast", "ggml slow"), key=lambda name: one["entries"][name]["us_min"])
    assert two["best"]["ggml"] == "ggml slow"
    assert "ggml fast" not in two["entries"]
    assert any("ggml fast is left out where M > 1" in warning for warning in result["warnings"])
    for case in (one, two):
        us = {name: entry["us_min"] for name, entry in case["entries"].items()}
        for group, name in case["best"].items():
            assert case["ratios"][group] == pytest.approx(us[name] / us["torch_qgemv"])
    assert "2.5e-01" in capsys.readouterr().out


def test_what_ggml_needs_is_known_for_every_instruction_set():
    assert set(ISAS) <= ggml.NEEDED_FEATURES.keys()
    assert "nothing is known" in FakePeer(None, 1).refusal("avx1024")
    assert FakePeer(None, 1).refusal("avx2") is None
    assert "AVX512" in FakePeer(None, 1).refusal("avx512_vnni")


def test_without_the_peer_the_benchmark_runs_and_says_how_to_get_it(tmp_path, capsys):
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1", peer=tmp_path)
    assert result["peers"] == {}
    assert "ggml" not in result["cases"][0]["ratios"]
    assert "`make ggml`" in capsys.readouterr().out


@pytest.mark.skipif(not list(BUILT_GGML.glob("ggml/**/libggml-cpu.*")), reason="`make ggml` has not been run")
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_the_real_ggml_multiplies_by_the_same_weight(quant_type):
    problem, x = Problem.random(quant_type, 1024, 64, "cpu"), random_x((5, 1024))
    peer = ggml.Ggml(BUILT_GGML / "ggml", threads=1)
    assert peer.features
    contestants = [entry for entry in peer.contestants(problem, 3, huge=True) if entry.takes(len(x))]
    assert "ggml CPU" in [entry.name for entry in contestants]
    for error in relative_errors(contestants, x, problem.matrix):
        assert 1e-4 < error < 3e-2  # 8-bit activations
    for entry in contestants:
        assert [call() for call in entry.calls(x)] == [0, 0, 0]


# Words to the user


def test_a_busy_machine_and_noisy_times_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (7.5, 1, 1))
    monkeypatch.setattr(bench, "NOISY", 0.5)  # any time counts as noisy
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1")
    assert result["cases"][0]["noisy"]
    printed = capsys.readouterr().out
    assert "busy (load average 7.5)" in printed
    assert "1 cases are marked ~" in printed


def test_a_quiet_machine_is_not_called_busy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (0.0, 9, 9))
    monkeypatch.setattr(bench, "NOISY", float("inf"))
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1")
    assert not result["cases"][0]["noisy"]
    assert result["warnings"] == []
    assert "busy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--types", "Q4_K,Q9_9"], "Q9_9: choose from Q4_0"),
        (["--m", "0"], "'0' is not a number from 1"),
        (["--m", "1,x"], "'x' is not a number from 1"),
        (["--shapes", "4096"], "'4096' is not of the form KxN"),
        (
            ["--shapes", "100x3", "--types", "Q4_0"],
            "--shapes 100x3: K is no multiple of the 32 weights",
        ),
        (["--isa", "mmx"], f"--isa mmx: only {', '.join(ISAS)} can run here"),
        (["--threads", "-1"], "'-1' is not a number from 1"),
    ],
)
def test_wrong_options_stop_before_anything_is_measured(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code not in (0, None)
    assert text in f"{stopped.value.code} {capsys.readouterr().err}"


def test_a_weight_too_large_for_the_machine_is_left_out_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "physical_memory", lambda: 4 * 64 * 48 * 2)  # room for bfloat16, not for float32
    result = run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1")
    assert result["cases"][0]["ratios"].keys() == {"F.linear bfloat16"}
    assert any("no F.linear float32 at 64x48" in warning for warning in result["warnings"])


def test_chart_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        run_bench(tmp_path, "--types", "Q4_0", "--shapes", "64x48", "--m", "1", "--chart", str(tmp_path / "chart.png"))


def test_chart(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(bench.PEERS, "ggml", FakePeer)
    chart = tmp_path / "chart.png"
    run_bench(tmp_path, "--types", "Q4_0,Q8_0", "--shapes", "64x48", "--m", "1,2", "--chart", str(chart), peer="build")
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_huge_pages_are_asked_for_inside_the_memory_only(monkeypatch):
    asked = []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: type("C", (), {"madvise": lambda *a: asked.append(a)}))
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 14, raising=False)
    page = 2 << 20
    memory.advise_huge_pages(5 * page + 64, 3 * page)
    memory.advise_huge_pages(5 * page + 64, page)  # no whole huge page inside
    assert [(begin.value, size.value, advice.value) for begin, size, advice in asked] == [(6 * page, 2 * page, 14)]


def test_the_command_line_lists_its_subcommands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "bench" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
