"""Loads the C++ extension, which registers torch.ops.torch_qgemv, and says why where it can't."""

import torch  # first: the extension links against its libraries

# Releases of torch with one C++ ABI. An extension of another group may load, and then crash.
ABI_GROUPS = (("2.10", "2.11"), ("2.12", "2.13", "2.14"))
_REBUILD = "compile it again: pip install --no-build-isolation --force-reinstall --no-deps torch_qgemv"


def _abi_group(version: str) -> tuple[str, ...] | None:
    release = ".".join(version.split(".")[:2])
    return next((group for group in ABI_GROUPS if release in group), None)


def check_torch(built_with: str, running: str) -> None:
    """Raises ImportError if an extension compiled against torch `built_with` can't run in torch `running`."""
    if _abi_group(built_with) is None or _abi_group(built_with) != _abi_group(running):
        raise ImportError(
            f"torch_qgemv was compiled against torch {built_with} and does not work with torch {running}; {_REBUILD}"
        )


try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"the extension of torch_qgemv does not load with torch {torch.__version__}: {error}; {_REBUILD}"
    ) from error

check_torch(_C.torch_version, torch.__version__)
