"""`python -m torch_qgemv inspect`: what it says of a file is what the file holds, and what loading makes of it."""

import re
from pathlib import Path

import gguf
import pytest
from gguf_files import QUANT, VALUE, array, build, info, pair, string, u32

import torch_qgemv
from torch_qgemv import GGUFFile, QuantEmbedding, QuantLinear
from torch_qgemv.__main__ import SUBCOMMANDS, main
from torch_qgemv.inspection import describe, fate

DATA = Path(__file__).parent / "data"


def odd_file(path):
    """A file with what is rare: experts, a packed vector, a packed convolution, types that can't be read."""
    tensors = {
        "blk.0.ffn_up_exps.weight": ((3, 4, 32), QUANT.Q8_0),
        "blk.0.conv.weight": ((2, 3, 32), QUANT.Q4_0),
        "blk.0.attn_q.bias": ((32,), QUANT.Q8_0),
        "blk.0.attn_q.weight": ((5, 32), QUANT.IQ4_NL),
        "blk.0.ffn_up.weight": ((5, 256), QUANT.TQ1_0),
        "blk.0.odd\x1b[2J.weight": ((5, 4), 4242),
        "positions": ((4,), QUANT.I32),
        "empty.weight": ((0, 32), QUANT.Q8_0),
        "reshaped.weight": ((5, 256), QUANT.Q4_K),
    }
    infos, data = [], b""
    for name, (shape, quant_type) in tensors.items():
        infos.append(info(name, shape[::-1], quant_type, len(data)))
        if quant_type in gguf.GGML_QUANT_SIZES:
            block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
            data += bytes(torch_qgemv.inspection.math.prod(shape) // block_size * type_size)
        data += bytes(-len(data) % 32)
    metadata = [
        pair("general.name", VALUE.STRING, string(b"red \x1b[31m \xff")),
        pair("words", VALUE.ARRAY, array(VALUE.STRING, 20, string("word") * 20)),
        pair("text", VALUE.STRING, string("x" * 500)),
        pair("comfy.gguf.orig_shape.reshaped.weight", VALUE.ARRAY, array(VALUE.INT32, 2, u32(4) + u32(320))),
    ]
    path.write_bytes(build(metadata, infos, data))
    return path


def section(report, title):
    """The rows of one table, each a list of cells, without the titles of the columns."""
    (_, *lines) = re.search(rf"^{title}\n(.*?)(\n\n|\Z)", report, re.DOTALL | re.MULTILINE)[1].splitlines()
    return [re.split(r"  +", line) for line in lines]


@pytest.mark.parametrize("name", ["tiny-llama-UDmix", "tiny-qwen3-Q4_K_M"])
def test_the_tables_are_those_of_the_file(name, capsys):
    path = DATA / f"{name}.gguf"
    assert main(["inspect", str(path)]) == 0
    report, file = capsys.readouterr().out.rstrip(), GGUFFile(path)
    reader = gguf.GGUFReader(path)
    tensors = [(t.name, t.tensor_type.name, str(t.shape[::-1].tolist()), f"{t.n_bytes:,}") for t in reader.tensors]
    assert [tuple(row[:4]) for row in section(report, "Tensors")] == tensors
    for quant_type, count, weights, size, _ in section(report, "Types"):
        same = [t for t in reader.tensors if t.tensor_type.name == quant_type]
        assert (count, weights) == (str(len(same)), f"{sum(int(t.n_elements) for t in same):,}")
        assert size == f"{sum(t.n_bytes for t in same):,}"
    assert {key for key, *_ in section(report, "Metadata")} == set(file.metadata)


@pytest.mark.parametrize("name", ["tiny-llama-UDmix", "tiny-qwen2-Q4_K_M", "tiny-gemma3-UDmix"])
def test_what_it_calls_packed_is_what_loading_packs(name):
    pytest.importorskip("transformers")
    path = DATA / f"{name}.gguf"
    model, _ = torch_qgemv.hf.from_gguf(path, prepare=False, progress=False)
    file = GGUFFile(path)
    held = {m.stored.data_ptr() for m in model.modules() if isinstance(m, (QuantLinear, QuantEmbedding))}
    assert len(held) == sum(fate(file, tensor).kind == "packed" for tensor in file.values())


def test_what_stays_dense_or_is_refused_has_its_reason(tmp_path):
    file = GGUFFile(odd_file(tmp_path / "odd.gguf"))
    fates = {name: str(fate(file, tensor)) for name, tensor in file.items()}
    refused = "refused: TQ1_0 is none of " + ", ".join(torch_qgemv.quant_types())
    assert fates == {
        "blk.0.ffn_up_exps.weight": "packed: 3 experts, where the model packs them",
        "blk.0.conv.weight": "dense: no matrix: a QuantLinear has two dimensions",
        "blk.0.attn_q.bias": "dense: no weight by its name",
        "blk.0.attn_q.weight": "packed",
        "blk.0.ffn_up.weight": refused,
        "blk.0.odd\x1b[2J.weight": "refused: GGUF type id 4242 is unknown",
        "positions": "dense: I32 is no packed type",
        "empty.weight": "packed",
        "reshaped.weight": "dense: its rows of 320 hold no whole Q4_K blocks",
    }


def test_nothing_in_a_file_can_drive_the_terminal(tmp_path):
    report = describe(GGUFFile(odd_file(tmp_path / "odd.gguf")))
    assert "\x1b" not in report and all(line.isprintable() for line in report.splitlines())
    assert r"\x1b[31m" in report and "unknown" in report
    assert ["reshaped.weight", "Q4_K", "[4, 320]", "720"] in [row[:4] for row in section(report, "Tensors")]
    report.encode()  # bytes that are not UTF-8 are spelt out


def test_long_metadata_are_shortened(tmp_path):
    rows = dict(row[:2] for row in section(describe(GGUFFile(odd_file(tmp_path / "odd.gguf"))), "Metadata"))
    assert rows["words"] == f"20 values: {', '.join(8 * [repr('word')])[:72]}, ..."
    assert rows["text"] == f"{72 * 'x'}... (500 characters)"


def test_names_choose_tensors_and_metadata():
    report = describe(GGUFFile(DATA / "tiny-llama-UDmix.gguf"), "attn_k")
    assert {name.split(".")[2] for name, *_ in section(report, "Tensors")} == {"attn_k"}
    assert "Metadata" not in report


def test_a_file_without_tensors_has_a_report(tmp_path):
    (tmp_path / "empty.gguf").write_bytes(build())
    assert "0 tensors, 0 weights, 0 bytes" in describe(GGUFFile(tmp_path / "empty.gguf"))


def test_errors_are_one_line(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"text")
    with pytest.raises(SystemExit, match=r"^inspect: .*bad\.gguf: header: not a GGUF file"):
        main(["inspect", str(tmp_path / "bad.gguf")])
    with pytest.raises(SystemExit, match=r"^inspect: .*No such file"):
        main(["inspect", str(tmp_path / "none.gguf")])


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_every_subcommand_is_its_whole_description(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert f"\n\n{SUBCOMMANDS[name].__doc__.strip()}\n\n" in text
