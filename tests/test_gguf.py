"""GGUFFile against gguf.GGUFReader on real files, and against hand-made files that lie."""

import io
import math
import random
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from torch_qgemv.gguf import GGUFError, GGUFFile, GGUFTensor

FIXTURES = sorted((Path(__file__).parent / "data").glob("tiny-*.gguf"))
VALUE = gguf.GGUFValueType
QUANT = gguf.GGMLQuantizationType
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


# A byte builder that writes whatever it is told, true or not.


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def pair(key, value_type, payload):
    return string(key) + u32(value_type) + payload


def array(item_type, count, payload):
    return u32(item_type) + u64(count) + payload


def info(name, dims, type_id=QUANT.I8, offset=0):
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


def build(pairs=(), infos=(), data=b"", version=3, alignment=32, tensor_count=None, pair_count=None, magic=b"GGUF"):
    tensor_count = len(infos) if tensor_count is None else tensor_count
    pair_count = len(pairs) if pair_count is None else pair_count
    header = magic + u32(version) + u64(tensor_count) + u64(pair_count) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def open_bytes(tmp_path, raw, name="file.gguf"):
    path = tmp_path / name
    path.write_bytes(raw)
    return GGUFFile(path)


def raw_bytes(tensor):
    return tensor.data.reshape(-1).view(torch.uint8).numpy().tobytes()


def write_file(path, tensors, alignment=None, metadata=None):
    """Write (name, array, raw_dtype) tensors with the gguf package's own writer."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, values, raw_dtype in tensors:
        writer.add_tensor(name, values, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


# Files that are damaged or lie

I8_INFO = info("t", [4])
LIES = {
    "text": (b"this is no model", "not a GGUF file.*b'this'"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "empty": (b"", "empty"),
    "magic only": (b"GGUF", "header.*4 bytes are needed"),
    "version 0": (build(version=0), "version 0 "),
    "version 1": (build(version=1), "version 1 "),
    "version 4": (build(version=4), "version 4 "),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "too many keys": (build(pair_count=2**64 - 1), f"header: {13 * (2**64 - 1)} bytes are needed"),
    "too many tensors": (build(tensor_count=2**63), f"header: {24 * 2**63} bytes are needed"),
    "key length": (build([u64(2**64 - 8) + b"key"]), "metadata key 0 of 1.*over the limit"),
    "key length past the end": (build([u64(60000) + bytes(16)]), "metadata key 0 of 1.*60000 bytes are needed"),
    "key not UTF-8": (build([pair(b"\xff", VALUE.UINT8, b"\1")]), "metadata key 0 of 1.*UTF-8"),
    "key twice": (build([pair("k", VALUE.UINT8, b"\1")] * 2), "'k'.*twice"),
    "value type": (build([pair("k", 13, b"")]), "'k'.*value type 13"),
    "item type": (build([pair("k", VALUE.ARRAY, array(99, 0, b""))]), "'k'.*value type 99"),
    "bool": (build([pair("k", VALUE.BOOL, b"\2")]), "'k'.*bool.*2"),
    "bools": (build([pair("k", VALUE.ARRAY, array(VALUE.BOOL, 3, b"\0\1\xff"))]), "'k'.*bool.*255"),
    "string length": (build([pair("k", VALUE.STRING, u64(2**64 - 1))]), "'k'"),
    "array count": (build([pair("k", VALUE.ARRAY, array(VALUE.UINT64, 2**61, b""))]), "'k'.*needed"),
    "string array count": (build([pair("k", VALUE.ARRAY, array(VALUE.STRING, 2**61, b""))]), "'k'.*needed"),
    "string in array": (
        build([pair("k", VALUE.ARRAY, array(VALUE.STRING, 2, string("a") + u64(1000)))]),
        "'k'.*string 1 of 2",
    ),
    "nested array count": (
        build([pair("k", VALUE.ARRAY, array(VALUE.ARRAY, 2**61, b""))]),
        f"'k'.*{12 * 2**61} bytes are needed",
    ),
    "nesting": (build([pair("k", VALUE.ARRAY, array(VALUE.ARRAY, 1, b"") * 5000)]), "'k'.*nested"),
    "alignment 0": (build([pair("general.alignment", VALUE.UINT32, u32(0))]), "general.alignment.*0 is not"),
    "alignment 4": (build([pair("general.alignment", VALUE.UINT32, u32(4))]), "general.alignment.*4 is not"),
    "alignment 12": (build([pair("general.alignment", VALUE.UINT32, u32(12))]), "general.alignment.*12 is not"),
    "alignment -8": (build([pair("general.alignment", VALUE.INT32, struct.pack("<i", -8))]), "general.alignment.*-8"),
    "alignment text": (build([pair("general.alignment", VALUE.STRING, string("32"))]), "general.alignment.*'32'"),
    "alignment true": (build([pair("general.alignment", VALUE.BOOL, b"\1")]), "general.alignment.*True"),
    "alignment huge": (
        build([pair("general.alignment", VALUE.UINT64, u64(2**63))], [I8_INFO], bytes(64)),
        "'t'.*data end at",
    ),
    "name length": (build((), [u64(2**63) + bytes(16)]), "tensor 0 of 1.*over the limit"),
    "name not UTF-8": (build((), [info(b"\xc3", [4])], bytes(4)), "tensor 0 of 1.*UTF-8"),
    "name twice": (build((), [info("t", [4]), info("t", [4], offset=32)], bytes(64)), "'t'.*twice"),
    "dimensions": (build((), [info("t", [1] * 9)], bytes(64)), "'t'.*9 dimensions"),
    "dimension count": (build((), [string("t") + u32(2**32 - 1)]), "'t'.*4294967295 dimensions"),
    "dims past 2^64": (build((), [info("t", [2**32, 2**32])], bytes(64)), "'t'.*too large"),
    "dims past 2^64, empty": (build((), [info("t", [2**63, 2**63, 0])], bytes(64)), "'t'.*too large"),
    "dim past the end": (build((), [info("t", [65])], bytes(64)), "'t'.*data end at"),
    "truncated data": (build((), [info("t", [64])], bytes(63)), "'t'.*data end at"),
    "offset past the end": (build((), [info("t", [4], offset=2**20)], bytes(64)), "'t'.*data end at"),
    "offset wraps": (build((), [info("t", [4], offset=2**64 - 32)], bytes(64)), "'t'.*data end at"),
    "empty past the end": (build((), [info("t", [0], offset=2**20)], bytes(64)), "'t'.*data end at"),
    "unknown past the end": (build((), [info("t", [9], UNKNOWN_TYPE, 2**20)], bytes(64)), "'t'.*data end at"),
    "offset unaligned": (build((), [info("t", [4], offset=8)], bytes(64)), "'t'.*offset 8.*alignment 32"),
    "offset unaligned, unknown": (build((), [info("t", [4], UNKNOWN_TYPE, 8)], bytes(64)), "'t'.*offset 8"),
    "overlap": (build((), [info("b", [8], offset=32), info("a", [33])], bytes(64)), "'b'.*overlap.*'a'"),
    "same place": (build((), [info("b", [8]), info("a", [8])], bytes(64)), "'b'.*overlap.*'a'"),
    "block": (build((), [info("t", [288, 8], QUANT.Q4_K)], bytes(4096)), "'t'.*288.*256.*Q4_K"),
    "block, no dims": (build((), [info("t", [], QUANT.Q8_0)], bytes(4096)), "'t'.*1.*32.*Q8_0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(tmp_path, lie):
    raw, message = LIES[lie]
    with pytest.raises(GGUFError, match=rf"(?s)file\.gguf: .*{message}"):
        open_bytes(tmp_path, raw)


def test_gguf_error_is_a_value_error():
    assert issubclass(GGUFError, ValueError)


def test_big_endian_file_of_the_reference_writer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GGUFError, match=r"big\.gguf.*big-endian"):
        GGUFFile(tmp_path / "big.gguf")


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(GGUFError, match="directory"):
        GGUFFile(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        GGUFFile(tmp_path / "absent.gguf")


def test_absurd_value_is_refused_before_it_is_copied(tmp_path):
    path, length = tmp_path / "sparse.gguf", 2**28 + 1
    for value_type, payload in ((VALUE.STRING, u64(length)), (VALUE.ARRAY, array(VALUE.INT8, length, b""))):
        with path.open("wb") as file:
            file.write(build([pair("k", value_type, payload)]))
            file.truncate(2**29)
        tracemalloc.start()
        with pytest.raises(GGUFError, match="'k'"):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


# Split files


def split_part(number, count, tensors, total, extra=(), **lies):
    counts = {"split.no": number - 1, "split.count": count} | lies
    pairs = [pair(key, VALUE.UINT16, struct.pack("<H", value)) for key, value in counts.items()]
    pairs += [*extra, pair("split.tensors.count", VALUE.INT32, u32(total))]
    infos = [info(name, [4], offset=32 * index) for index, name in enumerate(tensors)]
    return build(pairs, infos, b"".join(name.encode() * 4 + bytes(28) for name in tensors))


def write_split(folder, parts):
    paths = []
    for number, raw in enumerate(parts, 1):
        paths.append(folder / f"model-{number:05}-of-{len(parts):05}.gguf")
        if raw is not None:
            paths[-1].write_bytes(raw)
    return paths


def split_parts():
    first = [pair("general.architecture", VALUE.STRING, string("llama"))]
    later = [pair("later", VALUE.UINT8, b"\1")]
    return [split_part(1, 3, "ab", 4, first), split_part(2, 3, "", 4), split_part(3, 3, "cd", 4, later)]


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_opens_by_any_part(tmp_path, opened):
    file = GGUFFile(write_split(tmp_path, split_parts())[opened])
    assert {name: raw_bytes(tensor) for name, tensor in file.items()} == {name: name.encode() * 4 for name in "abcd"}
    assert list(file) == list("abcd")
    assert (file.metadata["general.architecture"], file.metadata["later"]) == ("llama", 1)
    assert (file.metadata["split.no"], file.metadata["split.count"]) == (0, 3)


def test_split_of_the_reference_writer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full(3, index, np.float32))
    writer.write_header_to_file(tmp_path / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("model-*-of-00003.gguf"))
    assert len(paths) == 3
    for path in paths:
        file = GGUFFile(path)
        assert [tensor.data.tolist() for tensor in file.values()] == [[index] * 3 for index in range(5)]
        assert file.metadata["general.architecture"] == "llama"


def test_single_part_needs_no_special_name(tmp_path):
    assert list(open_bytes(tmp_path, split_part(1, 1, "ab", 2))) == ["a", "b"]


@pytest.mark.parametrize(
    ("index", "part", "message"),
    [
        (2, None, r"00003-of-00003\.gguf: missing part 3 of 3"),
        (0, None, r"00001-of-00003\.gguf: missing part 1 of 3"),
        (1, split_part(2, 3, "b", 4), r"00002-of-00003\.gguf: tensor 'b' is also"),
        (1, split_part(2, 3, "", 4, **{"split.no": 2}), r"00002-of-00003\.gguf: split.no is 2, expected 1"),
        (2, split_part(3, 3, "cd", 4, **{"split.count": 4}), r"00003-of-00003\.gguf: split.count is 4, expected 3"),
        (2, build((), [info("c", [4])], bytes(4)), r"00003-of-00003\.gguf: split.no is None, expected 2"),
        (2, split_part(3, 3, "c", 4), "split.tensors.count is 4, the parts hold 3"),
        (2, split_part(3, 3, "cd", 4)[:-30], r"00003-of-00003\.gguf: tensor 'd'.*data end at"),
    ],
)
def test_split_that_does_not_fit_together(tmp_path, index, part, message):
    parts = split_parts()
    parts[index] = part
    paths = write_split(tmp_path, parts)
    with pytest.raises(GGUFError, match=message):
        GGUFFile(paths[1])


@pytest.mark.parametrize("name", ["renamed.gguf", "model-00001-of-00002.gguf", "model-00001-of-00003.bin"])
def test_split_with_another_name(tmp_path, name):
    with pytest.raises(GGUFError, match=f"{name}: split.count (is 3, expected 2|says a part)"):
        open_bytes(tmp_path, split_parts()[0], name)


@pytest.mark.parametrize(
    ("value_type", "payload"), [(VALUE.FLOAT32, struct.pack("<f", 3)), (VALUE.STRING, string("3"))]
)
def test_split_count_of_another_type(tmp_path, value_type, payload):
    raw = build([pair("split.count", value_type, payload), pair("split.no", VALUE.UINT8, b"\0")])
    with pytest.raises(GGUFError, match=r"split\.count is|missing part"):
        open_bytes(tmp_path, raw, "model-00001-of-00003.gguf")


# Fuzzing


def fuzz_file():
    """A small file with every kind of field; 24 bytes of data are each tensor's own."""
    tokens = b"".join(map(string, ["a", "", "bc"]))
    pairs = [
        pair("general.alignment", VALUE.UINT32, u32(8)),
        pair("k", VALUE.FLOAT32, struct.pack("<f", 1.5)),
        pair("b", VALUE.BOOL, b"\1"),
        pair("s", VALUE.STRING, string("text")),
        pair("n", VALUE.ARRAY, array(VALUE.INT32, 3, bytes(12))),
        pair("v", VALUE.ARRAY, array(VALUE.STRING, 3, tokens)),
        pair("w", VALUE.ARRAY, array(VALUE.ARRAY, 2, array(VALUE.UINT8, 2, b"\1\2") + array(VALUE.STRING, 0, b""))),
    ]
    infos = [
        info("q", [32, 2], QUANT.Q8_0),
        info("f", [2, 3], QUANT.F32, 72),
        info("e", [4, 0], QUANT.F16, 96),
        info("u", [4], UNKNOWN_TYPE, 96),
        info("i", [3], QUANT.I64, 104),
    ]
    return build(pairs, infos, bytes(range(128)), alignment=8)


def open_and_read_all(path, raw):
    """Open a file and read all its data. True, or False if it is refused with a GGUFError that names it."""
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
    except GGUFError as error:
        assert str(error).startswith(str(path))
        return False
    for tensor in file.values():
        if isinstance(tensor.quant_type, gguf.GGMLQuantizationType):
            block_size, type_size = gguf.GGML_QUANT_SIZES[tensor.quant_type]
            assert tensor.data.nbytes == math.prod(tensor.shape) // block_size * type_size <= len(raw)
            assert raw_bytes(tensor) in raw
        else:
            with pytest.raises(GGUFError):
                _ = tensor.data
    return True


@pytest.fixture
def no_big_allocation():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_every_truncation(tmp_path, no_big_allocation):
    raw = fuzz_file()
    assert open_and_read_all(tmp_path / "f.gguf", raw)
    for length in range(len(raw)):
        assert not open_and_read_all(tmp_path / "f.gguf", raw[:length]), length


def test_random_bytes(tmp_path, no_big_allocation):
    raw, generator = fuzz_file(), random.Random(0)
    outcomes = []
    for _ in range(3000):
        damaged = bytearray(raw)
        damaged[generator.randrange(len(raw))] = generator.randrange(256)
        outcomes.append(open_and_read_all(tmp_path / "f.gguf", bytes(damaged)))
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize("value", [0, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1])
def test_extreme_numbers_everywhere(tmp_path, no_big_allocation, value):
    raw = fuzz_file()
    for position in range(len(raw) - 8):
        open_and_read_all(tmp_path / "f.gguf", raw[:position] + u64(value) + raw[position + 8 :])
