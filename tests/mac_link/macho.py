"""Reads 64-bit Mach-O files (macOS object files and dylibs): the symbols they define and need, and their sections."""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy

MAGIC = 0xFEEDFACF
LC_SYMTAB, LC_ID_DYLIB, LC_SEGMENT_64 = 0x2, 0xD, 0x19
# In file order these number the libraries that undefined symbols name: load, lazy, weak, re-export, upward.
LC_LOADS = {0xC, 0x20, 0x80000018, 0x8000001F, 0x80000023}
N_STAB, N_PEXT, N_TYPE, N_EXT, N_UNDF = 0xE0, 0x10, 0x0E, 0x01, 0x00
SYMBOL = numpy.dtype([("name", "<u4"), ("type", "u1"), ("section", "u1"), ("flags", "<u2"), ("value", "<u8")])


@dataclass
class MachO:
    install_name: str = ""
    libraries: list[str] = field(default_factory=list)  # install names of what it loads
    defined: set[str] = field(default_factory=set)  # what it exports, or an object file offers
    needed: dict[str, str] = field(default_factory=dict)  # undefined symbol -> library that has it, "" if not said
    sections: dict[str, bytes] = field(default_factory=dict)

    def strings(self, section: str) -> set[str]:
        """The NUL-terminated strings of a section, such as __objc_methname."""
        return {text.decode() for text in self.sections.get(section, b"").split(b"\0") if text}


def read(path: Path, sections: tuple[str, ...] = ()) -> MachO:
    """Reads one file; of the sections' contents, only those named. Raises ValueError where it is not Mach-O."""
    out = MachO()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, *_, commands, _, _, _ = struct.unpack_from("<8I", data)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a 64-bit Mach-O file")
        at, symbols = 32, None
        for _ in range(commands):
            command, size = struct.unpack_from("<2I", data, at)
            if command == LC_SYMTAB:
                symbols = struct.unpack_from("<4I", data, at + 8)
            elif command == LC_ID_DYLIB or command in LC_LOADS:
                (offset,) = struct.unpack_from("<I", data, at + 8)
                name = data[at + offset : at + size].split(b"\0")[0].decode()
                if command == LC_ID_DYLIB:
                    out.install_name = name
                else:
                    out.libraries.append(name)
            elif command == LC_SEGMENT_64:
                _read_sections(data, at, sections, out)
            at += size
        if symbols:
            _read_symbols(data, *symbols, out)
    return out


def _read_sections(data, segment: int, wanted: tuple[str, ...], out: MachO):
    (count,) = struct.unpack_from("<I", data, segment + 64)
    for at in range(segment + 72, segment + 72 + 80 * count, 80):
        name = data[at : at + 16].rstrip(b"\0").decode()
        _, size, offset = struct.unpack_from("<QQI", data, at + 32)
        if name in wanted:
            out.sections[name] = out.sections.get(name, b"") + data[offset : offset + size]


def _read_symbols(data, offset: int, count: int, text_offset: int, text_size: int, out: MachO):
    table = numpy.frombuffer(data[offset : offset + count * SYMBOL.itemsize], SYMBOL)
    text = data[text_offset : text_offset + text_size]
    external = table[(table["type"] & N_STAB == 0) & (table["type"] & N_EXT != 0)]
    for name, kind, _, flags, _ in external.tolist():
        symbol = text[name : text.index(b"\0", name)].decode()
        if kind & N_TYPE != N_UNDF:
            if not kind & N_PEXT:
                out.defined.add(symbol)
            continue
        ordinal = flags >> 8
        out.needed[symbol] = out.libraries[ordinal - 1] if 0 < ordinal <= len(out.libraries) else ""
