"""python -m torch_qgemv quantize: GGUF files encoded anew."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_files import QUANT, VALUE, array, build, info, pair, raw_bytes, string, u32

import torch_qgemv
from torch_qgemv.__main__ import main
from torch_qgemv.gguf import GGUFError, GGUFFile, raw_metadata
from torch_qgemv.imatrix import load_imatrix
from torch_qgemv.requantize import requantize

RNG = np.random.default_rng(5)
F32, F16, BF16 = QUANT.F32, QUANT.F16, QUANT.BF16


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def as_bf16(values):
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()


# name -> (values as the file holds them, type)
TENSORS = {
    "token_embd.weight": (floats(40, 512).astype(np.float16), F16),
    "blk.0.attn_norm.weight": (floats(512), F32),
    "blk.0.attn_q.weight": (as_bf16(floats(24, 512)), BF16),
    "blk.0.ffn_down.weight": (floats(16, 96), F32),
    "blk.0.ffn_up.weight": (floats(16, 50), F32),
    "blk.0.ffn_gate_inp.weight": (floats(4, 512), F32),
    "blk.0.ffn_gate_exps.weight": (floats(3, 5, 512).astype(np.float16), F16),
    "output.weight": (gguf.quants.quantize(floats(8, 512), QUANT.Q8_0), QUANT.Q8_0),
}
METADATA = (
    pair("general.architecture", VALUE.STRING, string("llama")),
    pair("general.name", VALUE.STRING, string(b"not \xff UTF-8")),
    pair("empty", VALUE.ARRAY, array(VALUE.STRING, 0, b"")),
    pair("nested", VALUE.ARRAY, array(VALUE.ARRAY, 1, array(VALUE.UINT8, 2, b"\x01\x02"))),
    pair("general.alignment", VALUE.UINT32, u32(64)),
    pair("scale", VALUE.FLOAT64, struct.pack("<d", 1 / 3)),
)


def write_model(path, tensors=TENSORS, metadata=METADATA, alignment=64):
    infos, data = [], b""
    for name, (values, quant_type) in tensors.items():
        dims = values.shape if quant_type != QUANT.Q8_0 else (*values.shape[:-1], values.shape[-1] // 34 * 32)
        infos.append(info(name, dims[::-1], quant_type, len(data)))
        data += values.tobytes()
        data += bytes(-len(data) % alignment)
    path.write_bytes(build(metadata, infos, data, alignment=alignment))
    return path


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.gguf")


def test_everything_else_is_copied_byte_for_byte(model, tmp_path):
    target = tmp_path / "packed.gguf"
    result = requantize(model, target, "Q4_K")
    before, after = GGUFFile(model), GGUFFile(target)
    count, metadata = raw_metadata(model)
    new_count, new_metadata = raw_metadata(target)
    added = pair("general.quantization_version", VALUE.UINT32, u32(gguf.GGML_QUANT_VERSION))
    assert (new_count, new_metadata) == (count + 1, metadata + added)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape
        if name in result.kept:
            assert raw_bytes(tensor) == raw_bytes(before[name])
            assert tensor.quant_type == before[name].quant_type
    assert set(result.kept) | set(result.replaced) == set(before)
    assert result.bytes_before == sum(tensor.data.nbytes for tensor in before.values())
    assert result.bytes_after == sum(tensor.data.nbytes for tensor in after.values())
    reader = gguf.GGUFReader(target)  # gguf's own reader finds the same
    assert {t.name: bytes(t.data.tobytes()) for t in reader.tensors} == {n: raw_bytes(t) for n, t in after.items()}
    assert target.stat().st_size % 64 == 0  # llama.cpp reads the padding behind the last tensor too
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_matrices_become_what_quantize_makes_of_them(model, tmp_path):
    result = requantize(model, tmp_path / "packed.gguf", "Q4_K")
    assert result.replaced == {
        "token_embd.weight": "Q4_K",
        "blk.0.attn_q.weight": "Q4_K",
        "blk.0.ffn_down.weight": "Q5_0",  # rows of 96
        "blk.0.ffn_gate_exps.weight": "Q4_K",
    }
    assert result.kept == {
        "blk.0.attn_norm.weight": "no matrix",
        "blk.0.ffn_up.weight": "rows of 50 are filled by no blocks of Q4_K or its replacement",
        "blk.0.ffn_gate_inp.weight": "norm, router, convolution or table",
        "output.weight": "Q8_0 already",
    }
    before, after = GGUFFile(model), GGUFFile(tmp_path / "packed.gguf")
    for name, quant_type in result.replaced.items():
        rows = before[name].data.reshape(-1, before[name].shape[-1])
        assert after[name].quant_type.name == quant_type
        assert torch.equal(after[name].data.flatten(), torch_qgemv.quantize(rows, quant_type).flatten())


def test_map_first_match_and_copy(model, tmp_path, capsys):
    target = tmp_path / "packed.gguf"
    types = "attn_q=Q6_K,ffn_gate_inp=Q8_0,ffn_gate=IQ4_XS,token_embd=copy"
    assert main(["quantize", str(model), str(target), "--type", "Q4_K", "--map", types]) == 0
    found = {name: tensor.quant_type.name for name, tensor in GGUFFile(target).items()}
    assert found == {
        "token_embd.weight": "F16",
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_q.weight": "Q6_K",
        "blk.0.ffn_down.weight": "Q5_0",
        "blk.0.ffn_up.weight": "F32",
        "blk.0.ffn_gate_inp.weight": "Q8_0",
        "blk.0.ffn_gate_exps.weight": "IQ4_XS",
        "output.weight": "Q8_0",
    }
    printed = capsys.readouterr()
    assert "1 tensors now IQ4_XS" in printed.out
    assert "1 tensors kept: by the map" in printed.out
    assert "100%" in printed.err  # the progress bar


def write_imatrix(path, entries):
    writer = gguf.GGUFWriter(path, "")
    for name, (sums, counts) in entries.items():
        writer.add_tensor(name + ".in_sum2", sums)
        writer.add_tensor(name + ".counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_old_imatrix(path, entries):
    raw = struct.pack("<i", len(entries))
    for name, (values, calls) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size) + values.tobytes()
    path.write_bytes(raw + struct.pack("<ii", 7, 4) + b"text")


def test_importance_matrix_of_experts(model, tmp_path):
    sums, counts = np.abs(floats(3, 512)), np.array([[4], [0], [2]], dtype=np.float32)
    write_imatrix(tmp_path / "imatrix.gguf", {"blk.0.ffn_gate_exps.weight": (sums, counts)})
    result = requantize(model, tmp_path / "packed.gguf", "Q4_K", imatrix=tmp_path / "imatrix.gguf")
    assert result.without_importance == ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"]
    experts = GGUFFile(model)["blk.0.ffn_gate_exps.weight"].data
    packed = GGUFFile(tmp_path / "packed.gguf")["blk.0.ffn_gate_exps.weight"].data
    for e, importance in enumerate((sums[0] / 4, np.ones(512), sums[2] / 2)):
        expected = torch_qgemv.quantize(experts[e], "Q4_K", torch.from_numpy(np.float32(importance)))
        assert torch.equal(packed[e], expected)
    assert not torch.equal(packed[0], torch_qgemv.quantize(experts[0], "Q4_K"))


def test_both_forms_of_importance_matrices_give_the_same(tmp_path):
    values = np.abs(floats(1, 64))
    write_imatrix(tmp_path / "new", {"a": (values, np.array([[8]], dtype=np.float32))})
    write_old_imatrix(tmp_path / "old", {"a": (values, 8)})
    new, old = load_imatrix(tmp_path / "new"), load_imatrix(tmp_path / "old")
    assert new.keys() == old.keys() == {"a"}
    assert torch.equal(new["a"], old["a"])
    assert torch.equal(new["a"], torch.from_numpy(values / 8))


def test_damaged_importance_matrices_are_refused(model, tmp_path):
    path = tmp_path / "imatrix"
    write_old_imatrix(path, {"a": (np.abs(floats(64)), 8)})
    raw = path.read_bytes()
    for cut in (0, 3, 6, 9, 20, len(raw) - 30):
        path.write_bytes(raw[:cut])
        with pytest.raises(GGUFError, match=r"imatrix: (not an importance matrix|the file is empty)"):
            load_imatrix(path)
    with pytest.raises(GGUFError, match="not an importance matrix, for no tensor's name ends in"):
        load_imatrix(model)
    write_imatrix(path, {"blk.0.attn_q.weight": (np.abs(floats(1, 64)), np.ones((1, 1), np.float32))})
    with pytest.raises(ValueError, match=r"blk.0.attn_q.weight: importance of \[1, 64\] values doesn't fit"):
        requantize(model, tmp_path / "packed.gguf", "Q4_K", imatrix=path)


def test_errors_write_nothing(model, tmp_path):
    target = tmp_path / "packed.gguf"
    target.write_bytes(b"before")
    tensors = dict(TENSORS)
    bad = tensors["blk.0.ffn_down.weight"][0].copy()
    bad[3, 4] = np.nan
    tensors["blk.0.ffn_down.weight"] = (bad, F32)
    broken = write_model(tmp_path / "broken.gguf", tensors)
    with pytest.raises(ValueError, match=r"blk.0.ffn_down.weight: .* NaN or an infinity in row 3"):
        requantize(broken, target, "Q4_K")
    with pytest.raises(SystemExit, match=r"quantize: .*no tensor of .* has 'lm_head' in its name"):
        main(["quantize", str(model), str(target), "--type", "Q4_K", "--map", "lm_head=Q6_K"])
    with pytest.raises(SystemExit):
        main(["quantize", str(model), str(target), "--type", "Q4_K", "--map", "Q6_K"])
    with pytest.raises(SystemExit):
        main(["quantize", str(model), str(target), "--type", "Q9"])
    assert target.read_bytes() == b"before"
    unchanged = model.read_bytes()
    with pytest.raises(ValueError, match="is the source"):
        requantize(model, model, "Q4_K")
    assert model.read_bytes() == unchanged
    assert not list(tmp_path.glob("*.part"))


def test_a_part_of_a_split_model_is_refused(tmp_path):
    parts = [pair("split.no", VALUE.UINT16, b"\0\0"), pair("split.count", VALUE.UINT16, b"\x01\0")]
    assert requantize(write_model(tmp_path / "one.gguf", metadata=parts, alignment=32), tmp_path / "a", "Q4_K").replaced
    for number in (1, 2):
        parts = [
            pair("split.no", VALUE.UINT16, struct.pack("<H", number - 1)),
            pair("split.count", VALUE.UINT16, b"\x02\0"),
            pair("split.tensors.count", VALUE.INT32, struct.pack("<i", 2)),
        ]
        tensors = {f"t{number}": (floats(2, 32), F32)}
        write_model(tmp_path / f"m-0000{number}-of-00002.gguf", tensors, parts, alignment=32)
    with pytest.raises(ValueError, match="part of a split model; merge it first"):
        requantize(tmp_path / "m-00001-of-00002.gguf", tmp_path / "packed.gguf", "Q4_K")
