"""examples/quality.py: what packed models lose; and two real models beside the dequantized ones."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import real_models
import torch
from torch import nn

pytest.importorskip("transformers")
from torch_qgemv import QuantEmbedding, QuantLinear
from torch_qgemv.hf import from_gguf
from torch_qgemv.run.text import generate, unpack

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "tests/data/tiny-llama-Q4_K_M.gguf"
TIED = ROOT / "tests/data/tiny-qwen3-UDmix.gguf"


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("quality", ROOT / "examples/quality.py")
    module = sys.modules["quality"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def models(path=MODEL):
    """Dense and packed."""
    return unpack(from_gguf(path, progress=False)[0]), from_gguf(path, progress=False)[0]


def windows(count=3, length=16):
    ids = torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(1))
    return list(ids)


def by_name(rows):
    return {row.name: row for row in rows}


def test_figures_are_those_of_their_definitions(quality):
    dense, packed = models()
    own, as_it_is, q4 = quality.evaluate(dense, packed, windows(), ["Q4_0"], None)[0]
    with quality.packed(dense, "Q4_0", quality.groups(dense, None)["all"]), torch.no_grad():
        candidate = [dense(window[None]).logits[0, :-1].double() for window in windows()]
    with torch.no_grad():
        reference = [dense(window[None]).logits[0, :-1].double() for window in windows()]
        loss = sum(dense(w[None], labels=w[None]).loss.item() for w in windows()) / 3  # transformers' own
    assert own.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    p, q = torch.cat(reference).softmax(-1), torch.cat(candidate).softmax(-1)
    words = torch.cat([window[1:] for window in windows()])
    assert q4.perplexity == pytest.approx(q.gather(1, words[:, None]).log().mean().neg().exp().item(), rel=1e-6)
    torch.testing.assert_close(q4.kl, (p * (p / q).log()).sum(-1), rtol=1e-3, atol=1e-6)
    assert q4.agree == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert as_it_is.perplexity == pytest.approx(own.perplexity, rel=1e-5)
    assert as_it_is.kl.abs().max() < 1e-5 < q4.kl.mean()


def test_more_bits_cost_less(quality):
    rows = by_name(quality.evaluate(*models(), windows(), ["Q2_K", "Q4_0", "Q5_0", "Q8_0"], None)[0])
    costs = [rows[name].kl.mean().item() for name in ("Q2_K", "Q4_0", "Q5_0", "Q8_0", "as it is")]
    assert costs == sorted(costs, reverse=True)
    assert rows["Q4_0"].bits == 4.5 and rows["Q8_0"].bits == 8.5 and rows["reference"].bits == 32


@pytest.mark.parametrize("path", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("per", ["layer", "kind"])
def test_only_the_named_layers_are_packed_and_then_dense_again(quality, path, per):
    dense, _ = models(path)
    before = {name: (type(module), module) for name, module in dense.named_modules(remove_duplicate=False)}
    groups = quality.groups(dense, per)
    linears = [name for name, module in dense.named_modules() if isinstance(module, nn.Linear)]
    assert sorted(name for names in groups.values() for name in names) == sorted(linears)
    if per == "layer":
        assert all(f"layers.{number}." in name for number in "01" for name in groups[f"layer {number}"])
    else:
        assert [name.endswith("down_proj") for name in groups["kind down_proj"]] == [True, True]
    for names in groups.values():
        with quality.packed(dense, "Q8_0", names) as kept:
            found = {name for name, module in dense.named_modules() if isinstance(module, QuantLinear)}
            assert found == set(names) and not kept
            embedding = dense.get_input_embeddings()
            assert isinstance(embedding, QuantEmbedding) == (path == TIED and names == ["lm_head"])
    assert {n: (type(m), m) for n, m in dense.named_modules(remove_duplicate=False)} == before


def test_what_an_error_interrupts_is_dense_again(quality):
    dense, _ = models()
    with pytest.raises(KeyboardInterrupt), quality.packed(dense, "Q8_0", ["lm_head"]):
        raise KeyboardInterrupt
    assert type(dense.lm_head) is nn.Linear


def test_layers_that_stay_dense_are_named(quality):
    dense, packed = models(MODEL.with_stem("tiny-gemma3-UDmix"))  # its scaled embedding shares the output's weight
    rows, kept = quality.evaluate(dense, packed, windows(1), ["Q8_0"], "kind")
    assert kept == {"lm_head": "shares its weight with model.embed_tokens"}
    assert "Q8_0, kind lm_head" not in by_name(rows) and "Q8_0, kind q_proj" in by_name(rows)


def test_script_prints_a_table_and_draws_a_chart(quality, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the sea is blue " * 40)
    for per in ([], ["--per", "layer"]):
        chart = tmp_path / f"chart{len(per)}.png"
        arguments = [tmp_path / "text.txt", MODEL, "--types", "Q4_K,Q8_0", "--window", 32, "--tokens", 70]
        quality.main([*map(str, arguments), *per, "--chart", str(chart)])
        title, _, head, _, *lines = capsys.readouterr().out.splitlines()
        assert title == "tiny-llama-Q4_K_M.gguf on 2 x 32 tokens of text.txt"
        names = [line.split("|")[1].strip() for line in lines]
        layers = ("layer 0", "layer 1", "lm_head")
        rows = [f"{t}, {layer}" for t in ("Q4_K", "Q8_0") for layer in layers] if per else ["as it is", "Q4_K", "Q8_0"]
        assert names == ["reference", *rows]
        assert {line.count("|") for line in (head, *lines)} == {9}
        assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["none.txt"], r"none\.txt: .*No such file"),
        (["short.txt"], r"has \d+ tokens, one window takes 512; see --window and --tokens"),
        (["short.txt", "--types", "Q4_K,Q9"], "--types: Q9: not among Q4_0"),
        (["short.txt", "--window", "1"], "--window must be at least 2"),
        (["bytes.txt"], "quality.py: .*bytes.txt: 'utf-8' codec"),
    ],
)
def test_errors_are_one_line(quality, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("the sea")
    Path("bytes.txt").write_bytes(b"\xff\xff")
    with pytest.raises(SystemExit, match=r"^(?!0)") as stop:
        quality.main([arguments[0], str(MODEL), *arguments[1:]])
    output = capsys.readouterr().err + str(stop.value.code)
    assert re.search(message, output), output


@pytest.mark.slow
@pytest.mark.parametrize("get, prompts, windows", [(real_models.smollm2, 3, 6), (real_models.gemma3, 1, 2)])
def test_real_models_write_and_rate_text_as_the_dequantized_ones(quality, get, prompts, windows, tmp_path):
    path = get(tmp_path)
    packed, tokenizer = from_gguf(path, progress=False)
    dense = unpack(from_gguf(path, progress=False)[0])
    for prompt in ("The sea is", "Once upon a time", "def fibonacci(n):")[:prompts]:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        texts = [generate(model, ids, 64, eos_token_id=None) for model in (packed, dense)]
        assert len(texts[0]) == 64 and texts[0] == texts[1], prompt
    text = (ROOT / "docs/metal.md").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    parts = quality.cut(ids, 512, 512 * windows)
    assert len(parts) == windows
    own, as_it_is = quality.evaluate(dense, packed, parts, [], None)[0]
    assert as_it_is.perplexity == pytest.approx(own.perplexity, rel=1e-3)
    assert as_it_is.agree > 0.999
