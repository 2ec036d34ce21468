"""A builder of GGUF files that writes whatever it is told, true or not, and readers of what comes of it."""

import struct

import gguf
import torch

from torch_qgemv.gguf import GGUFFile

VALUE = gguf.GGUFValueType
QUANT = gguf.GGMLQuantizationType


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
