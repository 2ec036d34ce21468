"""python -m torch_qgemv selftest."""

import pytest
import torch

import torch_qgemv
from torch_qgemv.__main__ import main


def test_every_kernel_passes(device, capsys):
    assert main(["selftest", "--device", str(device)]) == 0
    out = capsys.readouterr().out
    assert "0 failures" in out and torch.__version__ in out
    for name in torch_qgemv.quant_types():
        assert any(line.split()[0] == name and line.split()[-1] == "0" for line in out.splitlines() if line)


def test_failures_are_listed_and_set_the_exit_status(monkeypatch, capsys):
    linear = torch_qgemv.ops.linear

    def wrong(x, weight, quant_type, bias=None):
        if x.dtype == torch.float16:
            raise RuntimeError("no such kernel")
        return linear(x, weight, quant_type, bias) * (1 + 1e-5)

    monkeypatch.setattr(torch_qgemv.ops, "linear", wrong)
    assert main(["selftest", "--device", "cpu", "--types", "Q8_0"]) == 1
    out = capsys.readouterr().out
    assert "Q8_0: linear float16 M=1: RuntimeError: no such kernel" in out
    assert "Q8_0: linear float32 unaligned M=40" in out and "29 failures" in out


def test_embedding_must_be_equal_bit_for_bit(monkeypatch, capsys):
    def one_bit_off(indices, weight, quant_type, dtype):
        rows = torch_qgemv.dequantize(weight, quant_type, dtype)[indices]
        rows[-1, -1] = rows[-1, -1].nextafter(torch.tensor(9.0, dtype=dtype))
        return rows

    monkeypatch.setattr(torch_qgemv.ops, "embedding", one_bit_off)
    assert main(["selftest", "--device", "cpu", "--types", "Q8_0"]) == 1
    assert "Q8_0: embedding bfloat16 unaligned: 2.0" in capsys.readouterr().out


def test_unknown_device():
    with pytest.raises(SystemExit, match=r"--device mps|--device xpu"):
        main(["selftest", "--device", "xpu"])
