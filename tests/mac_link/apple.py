"""Link stubs (.tbd files) of Apple's libraries, made without Apple's SDK.

Each lists the symbols that torch's own macOS libraries and MLX's import from that library: whatever is in the list
exists wherever torch itself loads.
"""

from collections import defaultdict
from pathlib import Path

from . import macho

LIBRARIES = {
    "libc++": "/usr/lib/libc++.1.dylib",
    "libobjc": "/usr/lib/libobjc.A.dylib",
    "Foundation": "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "CoreFoundation": "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
    "Metal": "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
    # The interpreter's: an extension finds them in whatever program has loaded it.
    "Python": "@rpath/Python",
}
# Not imported by any of those libraries, and known to exist: where they are documented.
ALSO = {
    "libc++": [
        # std::string's growth; which of its variants is called depends on the version of libc++'s headers (zig's here).
        "__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE21__grow_by_and_replaceEmmmmmmPKc",
    ],
    "Foundation": ["___CFConstantStringClassReference"],  # of @"..."
    "Metal": ["_OBJC_CLASS_$_MTLFunctionConstantValues"],  # metal-cpp: MTLFunctionConstantValues.hpp
}
CLASS = "_OBJC_CLASS_$_"


def symbols_of_apple(libraries: list[Path]) -> dict[str, set[str]]:
    """{name in LIBRARIES: symbols that these dylibs import from it}."""
    names = {path: name for name, path in LIBRARIES.items()}
    found = defaultdict(set, {name: set(symbols) for name, symbols in ALSO.items()})
    for library in libraries:
        for symbol, origin in macho.read(library).needed.items():
            if origin in names:
                found[names[origin]].add(symbol)
    return found


def write_stubs(libraries: list[Path], python: set[str], folder: Path) -> list[Path]:
    """Writes one .tbd per library into `folder`; returns their paths. python: the interpreter's symbols."""
    paths = []
    for name, symbols in {**symbols_of_apple(libraries), "Python": python}.items():
        plain = sorted(f"'{s}'" for s in symbols if not s.startswith(CLASS))
        classes = sorted(s.removeprefix(CLASS) for s in symbols if s.startswith(CLASS))
        text = "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        text += f"install-name: '{LIBRARIES[name]}'\nexports:\n  - targets: [ arm64-macos ]\n"
        if plain:
            text += f"    symbols: [ {', '.join(plain)} ]\n"
        if classes:
            text += f"    objc-classes: [ {', '.join(classes)} ]\n"
        paths.append(folder / f"{name}.tbd")
        paths[-1].write_text(text + "...\n")
    return paths
