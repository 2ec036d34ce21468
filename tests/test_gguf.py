"""GGUFFile against gguf.GGUFReader on real files, and on files of every kind that is allowed."""

import io
import math
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    QUANT,
    VALUE,
    array,
    build,
    info,
    open_bytes,
    pair,
    raw_bytes,
    string,
    u32,
    write_file,
)

from torch_qgemv.gguf import GGUFError, GGUFFile, GGUFTensor

FIXTURES = sorted((Path(__file__).parent / "data").glob("tiny-*.gguf"))
PLAIN_DTYPES = {
    QUANT.F32: torch.float32,
    QUANT.F16: torch.float16,
    QUANT.BF16: torch.bfloat16,
    QUANT.F64: torch.float64,
    QUANT.I8: torch.int8,
    QUANT.I16: torch.int16,
    QUANT.I32: torch.int32,
    QUANT.I64: torch.int64,
}
PACKED_TYPES = [quant_type for quant_type in gguf.GGML_QUANT_SIZES if quant_type not in PLAIN_DTYPES]
UNKNOWN_TYPE = 1000

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def two_tensors(tmp_path):
    """A packed [3, 512] Q4_K tensor of random bytes and an F32 [5] one."""
    packed = np.random.default_rng(0).integers(0, 256, (3, 288), dtype=np.uint8)
    tensors = [("packed", packed, QUANT.Q4_K), ("plain", np.arange(5, dtype=np.float32), None)]
    return write_file(tmp_path / "two.gguf", tensors)


# True files


def test_fixtures_are_there():
    assert len(FIXTURES) >= 4


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_fixture_equals_reference_reader(path):
    reference, file = gguf.GGUFReader(path), GGUFFile(path)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert {key: type(value) for key, value in file.metadata.items()} == {k: type(v) for k, v in expected.items()}
    assert list(file) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = file[tensor.name]
        assert (ours.name, ours.quant_type) == (tensor.name, tensor.tensor_type)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert tuple(ours.data.shape) == tensor.data.shape
        assert raw_bytes(ours) == tensor.data.tobytes()


def test_metadata_types(tmp_path):
    scalars = {
        VALUE.UINT8: ("<B", 255),
        VALUE.INT8: ("<b", -128),
        VALUE.UINT16: ("<H", 65535),
        VALUE.INT16: ("<h", -32768),
        VALUE.UINT32: ("<I", 2**32 - 1),
        VALUE.INT32: ("<i", -(2**31)),
        VALUE.UINT64: ("<Q", 2**64 - 1),
        VALUE.INT64: ("<q", -(2**63)),
        VALUE.FLOAT32: ("<f", 0.1),
        VALUE.FLOAT64: ("<d", 0.1),
        VALUE.BOOL: ("<?", True),
    }
    assert {*scalars, VALUE.STRING, VALUE.ARRAY} == set(VALUE)
    pairs, expected = [], {}
    for value_type, (code, value) in scalars.items():
        payload = struct.pack(code, value)
        (value,) = struct.unpack(code, payload)
        name = value_type.name
        pairs += [pair(name, value_type, payload)]
        pairs += [pair(f"{name}[]", VALUE.ARRAY, array(value_type, 2, payload + bytes(len(payload))))]
        pairs += [pair(f"{name}[0]", VALUE.ARRAY, array(value_type, 0, b""))]
        expected |= {name: value, f"{name}[]": [value, type(value)(0)], f"{name}[0]": []}
    nested = array(VALUE.ARRAY, 2, array(VALUE.STRING, 1, string("x")) + array(VALUE.INT8, 3, b"\1\2\3"))
    pairs += [
        pair("text", VALUE.STRING, string("é\n")),
        pair("", VALUE.STRING, string("")),
        pair("text[]", VALUE.ARRAY, array(VALUE.STRING, 3, string("") + string("日本") + string("c"))),
        pair("nested", VALUE.ARRAY, array(VALUE.ARRAY, 2, nested + array(VALUE.BOOL, 1, b"\1"))),
    ]
    expected |= {"text": "é\n", "": "", "text[]": ["", "日本", "c"], "nested": [[["x"], [1, 2, 3]], [True]]}
    metadata = open_bytes(tmp_path, build(pairs)).metadata
    assert metadata == expected
    assert list(metadata) == list(expected)
    for key, value in expected.items():
        assert type(metadata[key]) is type(value), key
        if isinstance(value, list) and value:
            assert type(metadata[key][0]) is type(value[0]), key


def test_broken_utf8_in_a_vocabulary_is_kept(tmp_path):
    tokens = [b"ok", b"\xff\xfe", b"\xe6\x97"]
    payload = array(VALUE.STRING, len(tokens), b"".join(map(string, tokens)))
    file = open_bytes(tmp_path, build([pair("tokens", VALUE.ARRAY, payload)]))
    assert [token.encode("utf-8", "surrogateescape") for token in file.metadata["tokens"]] == tokens


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 16, 24, 32, 64, 4096])
def test_alignment_and_version(tmp_path, alignment, version):
    second = -(-5 // alignment) * alignment
    infos = [info("a", [5]), info("b", [2], QUANT.F64, second)]
    data = (b"12345" + bytes(second - 5)) + struct.pack("<2d", 0.5, -1.5)
    pairs = [pair("general.alignment", VALUE.UINT32, u32(alignment))]
    file = open_bytes(tmp_path, build(pairs, infos, data, version, alignment))
    assert raw_bytes(file["a"]) == b"12345"
    assert file["b"].data.tolist() == [0.5, -1.5]


@pytest.mark.parametrize("alignment", [8, 16, 32, 64])
def test_alignment_of_the_reference_writer(tmp_path, alignment):
    values = [np.arange(count, dtype=np.float32) for count in (1, 7, 3)]
    tensors = [(f"t{index}", value, None) for index, value in enumerate(values)]
    file = GGUFFile(write_file(tmp_path / "aligned.gguf", tensors, alignment))
    for name, value, _ in tensors:
        assert file[name].data.tolist() == value.tolist()


@pytest.mark.parametrize("quant_type", PLAIN_DTYPES, ids=lambda quant_type: quant_type.name)
@pytest.mark.parametrize("dims", [[], [3], [3, 2], [4, 3, 2], [2, 1, 3, 2], [1, 2, 1, 2, 3]], ids=str)
def test_plain_types_and_ranks(tmp_path, quant_type, dims):
    dtype = PLAIN_DTYPES[quant_type]
    values = torch.arange(math.prod(dims)).to(dtype).reshape(dims[::-1])
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    tensor = open_bytes(tmp_path, build((), [info("t", dims, quant_type)], data))["t"]
    assert (tensor.quant_type, tensor.shape, tensor.data.dtype) == (quant_type, tuple(dims[::-1]), dtype)
    assert torch.equal(tensor.data, values)


@pytest.mark.parametrize("quant_type", PACKED_TYPES, ids=lambda quant_type: quant_type.name)
@pytest.mark.parametrize("rows", [[], [3], [3, 2], [3, 2, 2]], ids=str)
def test_packed_types_and_ranks(tmp_path, quant_type, rows):
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    shape, data_shape = (*rows, 2 * block_size), (*rows, 2 * type_size)
    data = np.random.default_rng(1).integers(0, 256, data_shape, dtype=np.uint8)
    raw = build((), [info("t", shape[::-1], quant_type)], data.tobytes())
    tensor = open_bytes(tmp_path, raw)["t"]
    assert (tensor.quant_type, tensor.shape, tensor.data.dtype) == (quant_type, shape, torch.uint8)
    assert np.array_equal(tensor.data.numpy(), data)


@pytest.mark.parametrize(
    ("dims", "quant_type", "data_shape"),
    [
        ([0], QUANT.F32, (0,)),
        ([4, 0], QUANT.F16, (0, 4)),
        ([0, 4], QUANT.I64, (4, 0)),
        ([0], QUANT.Q4_K, (0,)),
        ([256, 0], QUANT.Q4_K, (0, 144)),
        ([0, 4], QUANT.Q8_0, (4, 0)),
        ([0, 2**55], QUANT.F64, (2**55, 0)),
    ],
)
def test_zero_sized_tensors(tmp_path, dims, quant_type, data_shape):
    infos = [info("a", [3]), info("empty", dims, quant_type, 32), info("b", [2], offset=32)]
    file = open_bytes(tmp_path, build((), infos, b"abc" + bytes(29) + b"de"))
    assert (file["empty"].shape, tuple(file["empty"].data.shape)) == (tuple(dims[::-1]), data_shape)
    assert file["empty"].data.untyped_storage().nbytes() == 0
    assert raw_bytes(file["b"]) == b"de"
    # The last padding may be missing: the empty tensor then starts past the end of the file.
    file = open_bytes(tmp_path, build((), infos[:2], b"abc"))
    assert tuple(file["empty"].data.shape) == data_shape
    # Any aligned place will do, as no byte there is its own.
    file = open_bytes(tmp_path, build((), [info("a", [40]), infos[1]], bytes(40)))
    assert tuple(file["empty"].data.shape) == data_shape


def test_no_tensors(tmp_path):
    file = open_bytes(tmp_path, build([pair("k", VALUE.UINT8, b"\7")], alignment=1))
    assert (len(file), list(file), file.metadata) == (0, [], {"k": 7})


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files; the limit on private maps is Linux's")
def test_file_larger_than_memory_and_swap(tmp_path):
    size, path = 2**40, tmp_path / "sparse.gguf"
    header = build((), [info("huge", [size])])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    data = GGUFFile(path)["huge"].data
    data[-1] = 5
    assert (data.numel(), data[-1].item(), data[0].item()) == (size, 5, 0)


# The Mapping, the tensors' storage and lifetime


def test_mapping(two_tensors):
    file = GGUFFile(str(two_tensors))
    assert list(file) == ["packed", "plain"] and len(file) == 2
    assert "packed" in file and "absent" not in file and file.get("absent") is None
    assert all(isinstance(tensor, GGUFTensor) and tensor.name == name for name, tensor in file.items())
    assert file["packed"] is file["packed"] and file["packed"].data is file["packed"].data
    with pytest.raises(KeyError, match="absent"):
        file["absent"]
    with pytest.raises(AttributeError):
        file["packed"].shape = (1,)
    assert repr(file) == f"GGUFFile({str(two_tensors)!r}, llama, 2 tensors)"
    assert "name='packed'" in repr(file["packed"]) and "Q4_K" in repr(file["packed"])
    assert "shape=(3, 512)" in repr(file["packed"])


def test_each_tensor_has_an_exact_storage(two_tensors):
    for tensor in GGUFFile(two_tensors).values():
        data = tensor.data
        assert data.storage_offset() == 0 and data.is_contiguous()
        assert data.untyped_storage().nbytes() == data.nbytes
        buffer = io.BytesIO()
        torch.save(data, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), data)


def test_writes_stay_private(two_tensors):
    before = two_tensors.read_bytes()
    file, other = GGUFFile(two_tensors), GGUFFile(two_tensors)
    packed = file["packed"].data
    packed.zero_()
    packed.numpy()[0, 0] = 9
    file["plain"].data.add_(1)
    assert packed.sum() == 9 and file["plain"].data.tolist() == [1, 2, 3, 4, 5]
    assert other["plain"].data.tolist() == [0, 1, 2, 3, 4]
    assert two_tensors.read_bytes() == before


def test_tensors_outlive_the_file_object(two_tensors):
    expected = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(two_tensors).tensors}
    file = GGUFFile(two_tensors)
    never_read, data = file["plain"], file["packed"].data
    two_tensors.unlink()
    del file
    assert data.numpy().tobytes() == expected["packed"]
    assert raw_bytes(never_read) == expected["plain"]


def test_data_are_on_the_cpu_whatever_the_default_device(tmp_path):
    file = open_bytes(tmp_path, build((), [info("t", [4]), info("empty", [0], offset=32)], b"abcd"))
    with torch.device("meta"):
        assert {tensor.data.device.type for tensor in file.values()} == {"cpu"}


def test_unknown_type_is_listed_but_has_no_data(tmp_path):
    infos = [info("odd", [256, 2], UNKNOWN_TYPE), info("known", [3], offset=32)]
    file = open_bytes(tmp_path, build((), infos, bytes(32) + b"abc"))
    assert "odd" in file and len(file) == 2
    assert (file["odd"].quant_type, file["odd"].shape) == (UNKNOWN_TYPE, (2, 256))
    assert raw_bytes(file["known"]) == b"abc"
    with pytest.raises(GGUFError, match=r"file\.gguf.*'odd'.*1000"):
        _ = file["odd"].data
