"""Fixtures shared by all tests.

TORCH_QGEMV_TEST_DEVICES=cpu,mps-sim,mps names the devices to test on: each of them has to be there, others aren't used.
Without it: the CPU and a GPU, which is Apple's where there is one, elsewhere the simulated one (metal_sim/README.md)
if it can be built; in CI it must be.
"""

import functools
import os
import runpy
from pathlib import Path

import metal_sim
import plans
import pytest
import torch

ROOT = Path(__file__).parents[1]
DEVICES = ("cpu", "mps-sim", "mps")
WANTED = os.environ.get("TORCH_QGEMV_TEST_DEVICES")


def chosen_devices() -> list[str]:
    if WANTED is None:
        return ["cpu", "mps" if torch.backends.mps.is_available() else "mps-sim"]
    names = [name.strip() for name in WANTED.split(",")]
    if unknown := set(names) - set(DEVICES):
        raise pytest.UsageError(f"TORCH_QGEMV_TEST_DEVICES has {', '.join(sorted(unknown))}; there are {DEVICES}")
    if "mps" in names and not torch.backends.mps.is_available():
        raise pytest.UsageError("TORCH_QGEMV_TEST_DEVICES has mps, but torch finds no MPS device")
    if {"mps", "mps-sim"} <= set(names):
        raise pytest.UsageError("TORCH_QGEMV_TEST_DEVICES has mps and mps-sim: one process can use only one of them")
    return names


def simulator_problem() -> str | None:
    """Makes the simulated device torch's "mps" if it is to be tested on; why not, where it can't be built.

    Before any test: torch looks for an accelerator once, and remembers that there was none.
    """
    if "mps-sim" not in CHOSEN:
        return "the simulated Metal device is not among the devices to test on"
    try:
        metal_sim.install()
    except metal_sim.Unavailable as error:
        if WANTED or os.environ.get("CI"):
            raise pytest.UsageError(f"no simulated Metal device: {error}") from None
        return f"no simulated Metal device: {error}"


def load_launcher():
    """Builds csrc/mps for the simulated device and registers its operators."""
    import torch_qgemv  # noqa: F401  (the schemas)

    metal_sim.install()
    embedded = runpy.run_path(str(ROOT / "metal" / "embed.py"))["embedded"]()
    sources = sorted((ROOT / "csrc" / "mps").glob("*.mm"))
    metal_sim.load(metal_sim.build(sources, include_dirs=[ROOT / "csrc"], embedded={"metal_sources.inc": embedded}))


CHOSEN = chosen_devices()
PROBLEM = simulator_problem()


@pytest.fixture(scope="session")
def simulator():
    """The simulated Metal device, with the operators on it."""
    if PROBLEM:
        pytest.skip(PROBLEM)
    load_launcher()
    return metal_sim


@pytest.fixture
def record(simulator):
    """Calls give the launches since the last call."""
    simulator.clear()

    def record():
        launches = simulator.dispatches()
        simulator.clear()
        return launches

    return record


@pytest.fixture(scope="session")
def plan_library(tmp_path_factory):
    """The launch plan as a library (plans.SOURCE)."""
    return plans.launch_plan(tmp_path_factory.mktemp("launch_plan"))


@pytest.fixture
def plan(plan_library):
    """plan(family, quant_type, N, K, ...): a launch; see plans.plan_launch."""
    return functools.partial(plans.plan_launch, plan_library)


def use_device(name, request) -> str:
    if name == "mps-sim":
        request.getfixturevalue("simulator")
    return name.removesuffix("-sim")


@pytest.fixture(params=CHOSEN)
def device(request):
    """The device that a test runs on: "cpu" or "mps"."""
    return use_device(request.param, request)


@pytest.fixture(params=[name for name in CHOSEN if name != "cpu"])
def mps(request):
    """The device "mps", Apple's or the simulated one."""
    return use_device(request.param, request)
