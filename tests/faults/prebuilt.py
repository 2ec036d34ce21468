"""A pytest plugin: the launcher is the library that $PREBUILT_LAUNCHER names, and isn't built once more."""

import os
from pathlib import Path

import metal_sim

metal_sim.build = lambda *args, **options: Path(os.environ["PREBUILT_LAUNCHER"])
