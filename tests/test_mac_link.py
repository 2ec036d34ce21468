"""On Linux: the extension compiles for macOS and links with torch's macOS wheels, and calls only what Metal has."""

import os
import sys

import mac_link
import pytest
from metal_sim.toolchain import CompileError, Unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac the real build is the test"),
]


@pytest.fixture(scope="module", autouse=True)
def tools():
    """The compiler and the wheel that every test here needs."""
    try:
        mac_link.zig()
        mac_link.mlx_wheel()
    except Unavailable as error:
        unavailable(error)


def unavailable(error):
    if os.environ.get("CI"):
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="module", params=mac_link.TORCH_VERSIONS)
def torch_folder(request):
    try:
        return mac_link.torch_wheel(request.param)
    except Unavailable as error:
        unavailable(error)


def compile_text(tmp_path, name, text, torch_folder):
    source = tmp_path / name
    source.write_text(text)
    return mac_link.compile_object(source, torch_folder)


def test_the_extension_links(torch_folder, tmp_path):
    objects = mac_link.compile_extension(torch_folder)
    library = tmp_path / "_C.so"
    mac_link.link(objects, torch_folder, library)
    assert "_PyInit__C" in mac_link.macho.read(library).defined


def test_every_selector_is_metals(torch_folder):
    selectors = mac_link.selectors_of(mac_link.compile_extension(torch_folder))
    assert "setComputePipelineState:" in selectors
    assert selectors - mac_link.known_selectors(torch_folder) == set()


# The checks themselves find what they are there to find.


@pytest.fixture(scope="module")
def one_torch():
    try:
        return mac_link.torch_wheel(mac_link.TORCH_VERSIONS[0])
    except Unavailable as error:
        unavailable(error)


@pytest.mark.parametrize(
    "declaration, call, symbol",
    [
        ("namespace at::mps { void commit_all(); }", "at::mps::commit_all()", "__ZN2at3mps10commit_allEv"),
        ('extern "C" int sched_setaffinity(int);', "sched_setaffinity(0)", "_sched_setaffinity"),
        ('extern "C" void Py_NoSuchFunction();', "Py_NoSuchFunction()", "_Py_NoSuchFunction"),
    ],
    ids=["torch", "Linux", "Python"],
)
def test_an_undefined_symbol_is_an_error(one_torch, tmp_path, declaration, call, symbol):
    made = compile_text(tmp_path, "wrong.cpp", f"{declaration}\nvoid f();\nvoid f() {{ {call}; }}\n", one_torch)
    with pytest.raises(CompileError, match=f"undefined symbol: {symbol}"):
        mac_link.link([made], one_torch, tmp_path / "wrong.so")


def test_an_unknown_selector_is_found(one_torch, tmp_path):
    text = "#import <Metal/Metal.h>\n@protocol Wrong - (void)commitNow; - (void)commit; @end\nvoid f(id<Wrong> w);\n"
    made = compile_text(tmp_path, "wrong.mm", text + "void f(id<Wrong> w) { [w commitNow]; [w commit]; }\n", one_torch)
    assert mac_link.selectors_of([made]) - mac_link.known_selectors(one_torch) == {"commitNow"}


def test_linux_headers_are_not_there(one_torch, tmp_path):
    with pytest.raises(CompileError, match=r"sys/sysinfo.h' file not found"):
        compile_text(tmp_path, "wrong.cpp", "#include <sys/sysinfo.h>\n", one_torch)
