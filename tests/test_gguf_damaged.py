"""GGUFFile on damaged, lying and split files: GGUFError or the right tensors, never anything else."""

import math
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
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
    u64,
)

from torch_qgemv.gguf import GGUFError, GGUFFile

UNKNOWN_TYPE = 1000

pytestmark = pytest.mark.filterwarnings("error")


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
