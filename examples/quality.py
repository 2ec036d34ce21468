"""What a packed type costs: perplexity and KL divergence of a model, for each type and for each layer, on a text.

    python examples/quality.py text.txt                                     SmolLM2-135M-Instruct, every type
    python examples/quality.py text.txt model-F16.gguf --types Q4_K,Q6_K
    python examples/quality.py text.txt --types Q3_K --per layer            which layers suffer most from Q3_K
    python examples/quality.py text.txt --types Q3_K --per kind             ... which kinds of matrices

The reference is the file's model with every weight dequantized to float32; take a file of F16 or BF16 weights for the
whole cost of a type, since a packed file has paid a part of it. Each row of the table is that model with linear layers
packed as one type: all of them, or, with --per, one decoder layer or one kind of matrix at a time (a tied input
embedding follows the output layer). Of a packed file, "as it is" is what its own types lose by computing packed, which
is next to nothing. The text is cut into windows of --window tokens; each token but a window's first
is predicted from those before it in the window.

Columns: bits per weight of the packed matrices; their size; perplexity, and how much more it is than the reference's;
KL divergence from the reference's prediction to the packed model's, in nats per token: its mean and its 99th percentile
(the worst hundredth of the tokens); how often the two models' first choices are the same.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from torch_qgemv import quant_types, quantize_model
from torch_qgemv.modules import PackedModule
from torch_qgemv.run import default_model
from torch_qgemv.run.text import load, unpack

AS_IT_IS = "as it is"
KEYS = {"layer": r"\.(\d+)\.", "kind": r"([^.]+)$"}  # --per: the part of a linear layer's name that makes its group


@dataclass
class Row:
    """One row of the table. nll: mean negative log-likelihood of a token; kl: of each token; agree: share of tokens."""

    name: str
    weights: int
    nbytes: int
    nll: float
    kl: torch.Tensor
    agree: float

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.nll, dtype=torch.float64).exp())

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.weights


class Reference:
    """Log-probabilities of the dense model over all windows, kept in a temporary file."""

    def __init__(self, model: nn.Module, windows: list[torch.Tensor], folder: str, bar: tqdm) -> None:
        self.windows = windows
        first = log_probabilities(model, windows[0])
        size = len(windows) * first.numel()
        shape = (len(windows), *first.shape)
        self.logits = torch.from_file(f"{folder}/reference", shared=True, size=size).view(shape)
        for window, kept in zip(windows, self.logits, strict=True):
            kept.copy_(log_probabilities(model, window))
            bar.update()
        self.nll = mean_nll(list(self.logits), windows)

    def compare(self, model: nn.Module, name: str, weights: int, nbytes: int, bar: tqdm) -> Row:
        """How the predictions of `model` differ."""
        losses, divergences, agreements = [], [], []
        for window, expected in zip(self.windows, self.logits, strict=True):
            actual = log_probabilities(model, window)
            losses.append(mean_nll([actual], [window]))
            divergences.append(kl_divergence(expected, actual))
            agreements.append((expected.argmax(-1) == actual.argmax(-1)).double().mean().item())
            bar.update()
        count = len(self.windows)
        return Row(name, weights, nbytes, sum(losses) / count, torch.cat(divergences), sum(agreements) / count)


@torch.inference_mode()
def log_probabilities(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Of every word [tokens - 1, vocabulary], for each token of the window but the first."""
    return F.log_softmax(model(window[None], use_cache=False).logits[0, :-1].float(), -1)


def mean_nll(predictions: list[torch.Tensor], windows: list[torch.Tensor]) -> float:
    losses = [F.nll_loss(p, window[1:], reduction="none") for p, window in zip(predictions, windows, strict=True)]
    return torch.cat(losses).double().mean().item()


def kl_divergence(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """KL(expected || actual) in nats, float64 [tokens], of log-probabilities [tokens, vocabulary]."""
    rows = ((e.double(), a.double()) for e, a in zip(expected, actual, strict=True))
    return torch.stack([(e.exp() * (e - a)).sum() for e, a in rows])


def cut(ids: torch.Tensor, window: int, tokens: int) -> list[torch.Tensor]:
    """Whole windows of the text, at most `tokens` tokens of it."""
    windows = [part for part in ids[:tokens].split(window) if len(part) == window]
    if not windows:
        sys.exit(f"quality.py: the text has {len(ids)} tokens, one window takes {window}; see --window and --tokens")
    return windows


def packed_size(model: nn.Module) -> tuple[int, int]:
    """Weights and bytes of the packed matrices, tied ones counted once."""
    modules = {m.stored.data_ptr(): m for m in model.modules() if isinstance(m, PackedModule)}.values()
    return sum(math.prod(m.matrix_shape) for m in modules), sum(m.stored.nbytes for m in modules)


@contextmanager
def packed(model: nn.Module, quant_type: str, names: list[str]) -> Iterator[dict[str, str]]:
    """`model` with the named linear layers packed, and then as it was. Gives those that can't be, with the reason."""
    dense, reports = dict(model.named_modules(remove_duplicate=False)), []
    quantize_model(model, quant_type, lambda name, _: name in names, fallback=True, report=reports.append)
    (report,) = reports
    try:
        yield {name: reason for name, reason in report.kept.items() if name in names}
    finally:
        for name in report.replaced:
            model.set_submodule(name, dense[name])


def groups(model: nn.Module, per: str | None) -> dict[str, list[str]]:
    """What is packed at a time: a group's name -> names of linear layers. Without `per`: one group."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            match = re.search(KEYS[per], name) if per else None
            found.setdefault(f"{per} {match[1]}" if match else name if per else "all", []).append(name)
    return found


def evaluate(
    model: nn.Module, loaded: nn.Module, windows: list[torch.Tensor], types: list[str], per: str | None
) -> tuple[list[Row], dict[str, str]]:
    """The rows of the table, and linear layers that stayed dense, with the reason.

    The first row is the dense model's; if `per` is None and the model as `loaded` has packed layers, the second is its.
    """
    chosen = groups(model, per)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    runs = [(quant_type, group) for quant_type in types for group in chosen]
    as_it_is = per is None and any(isinstance(module, PackedModule) for module in loaded.modules())
    total = (1 + as_it_is + len(runs)) * len(windows)
    # Here, not in memory: 4 bytes for each token and word of the vocabulary.
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit="window", disable=None) as bar:
        bar.set_description("reference")
        reference = Reference(model, windows, folder, bar)
        zeros = torch.zeros(sum(len(window) - 1 for window in windows), dtype=torch.float64)
        own = Row("reference", weights, 4 * weights, reference.nll, zeros, 1.0)
        rows: list[Row] = []
        kept: dict[str, str] = {}
        if as_it_is:
            rows.append(reference.compare(loaded, AS_IT_IS, *packed_size(loaded), bar))
        for quant_type, group in runs:
            name = f"{quant_type}, {group}" if per else quant_type
            bar.set_description(name)
            with packed(model, quant_type, chosen[group]) as left:
                kept |= left
                weights, nbytes = packed_size(model)
                if weights:  # else the whole group stayed dense
                    rows.append(reference.compare(model, name, weights, nbytes, bar))
    return [own, *rows], kept


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table; the first is the reference."""
    own, *rows = rows
    lines = [
        "| packed | bits per weight | MB | perplexity | more | KL mean | KL 99 % | same first choice |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        f"| {own.name} | {own.bits:.2f} | {own.nbytes / 1e6:.1f} | {own.perplexity:.4f} | | | | |",
    ]
    for row in rows:
        more = f"{100 * (row.perplexity / own.perplexity - 1):+.2f} %"
        divergence = f"{row.kl.mean().item():.2e} | {row.kl.quantile(0.99).item():.2e}"
        lines.append(
            f"| {row.name} | {row.bits:.2f} | {row.nbytes / 1e6:.1f} | {row.perplexity:.4f} | {more} | {divergence} "
            f"| {100 * row.agree:.2f} % |"
        )
    return "\n".join(lines)


def draw(rows: list[Row], per: str | None, title: str, path: Path) -> None:
    """The KL divergence of each type against its bits per weight, or, with `per`, a bar for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2 + 0.2 * len(rows) if per else 5), layout="constrained")
    axes = figure.add_subplot()
    values = [max(row.kl.mean().item(), 1e-12) for row in rows]
    if per:
        axes.barh([row.name for row in rows], values)
        axes.invert_yaxis()
        axes.set_xlabel("mean KL divergence from the reference, nats per token")
    else:
        axes.plot([row.bits for row in rows], values, "o")
        points = sorted((row.bits, value, row.name) for row, value in zip(rows, values, strict=True))
        for index, (bits, value, name) in enumerate(points):  # types of nearly the same size on either side
            side = ((5, 4), "left") if index % 2 else ((-5, -9), "right")
            axes.annotate(name, (bits, value), xytext=side[0], textcoords="offset points", ha=side[1], size=8)
        axes.margins(x=0.1)
        axes.set_yscale("log")
        axes.set_xlabel("bits per weight")
        axes.set_ylabel("mean KL divergence from the reference, nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What a packed type costs: perplexity and KL divergence on a text, for each type and layer."
    )
    parser.add_argument("text", type=Path, help="a text file in UTF-8")
    parser.add_argument("model", nargs="?", type=Path, help="a .gguf file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--types", default=",".join(quant_types()), help="GGUF types: Q4_K,Q6_K (default: all)")
    parser.add_argument("--per", choices=KEYS, help="pack one decoder layer, or one kind of matrix, at a time")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together (default: 512)")
    parser.add_argument("--tokens", type=int, default=2048, help="the most tokens of the text (default: 2048)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")
    args = parser.parse_args(arguments)
    args.types = args.types.split(",")
    if unknown := set(args.types) - set(quant_types()):
        parser.error(f"--types: {', '.join(sorted(unknown))}: not among {', '.join(quant_types())}")
    if args.window < 2 or (args.threads is not None and args.threads < 1):
        parser.error("--window must be at least 2, --threads at least 1")
    if args.chart:
        try:
            import matplotlib as _  # noqa: F401
        except ImportError:
            parser.error("--chart needs matplotlib. Run: pip install 'torch_qgemv[bench]'")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"quality.py: {args.text}: {error}")
    path = args.model or default_model()
    model, tokenizer, _ = load(path, torch.device("cpu"), torch.float32)
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    windows = cut(ids, args.window, args.tokens)
    dense = unpack(load(path, model.device, model.dtype)[0])
    rows, kept = evaluate(dense, model, windows, args.types, args.per)
    title = f"{path.name} on {len(windows)} x {args.window} tokens of {args.text.name}"
    print(f"{title}\n\n{table(rows)}", end="\n\n" if kept else "\n")
    for name, reason in kept.items():
        print(f"{name} stayed dense: {reason}")
    if args.chart:
        draw([row for row in rows[1:] if row.name != AS_IT_IS], args.per, title, args.chart)


if __name__ == "__main__":
    main()
