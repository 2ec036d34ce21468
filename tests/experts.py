"""Weights of experts, and what their products are measured with."""

import torch
from formats import assert_linear_close, dequantized, random_packed


def random_experts(quant_type, E, N, K):
    """Packed weights [E, N, row_bytes], all rows different."""
    return random_packed(quant_type, E * N, K).view(E, N, -1)


def random_ids(shape, E, dtype=torch.long, seed=0):
    return torch.randint(E, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(weight, quant_type):
    """float32 [E, N, K]"""
    return torch.stack([dequantized(each, quant_type) for each in weight.cpu()])


def assert_experts_close(y, x, weight, ids, quant_type, context=""):
    """Each expert's rows of y are as accurate as linear with its weight."""
    ids, y, x = ids.cpu(), y.cpu(), x.detach().cpu()
    assert y.shape == (*ids.shape, weight.shape[1]), context
    rows = (x if ids.dim() < x.dim() else x.unsqueeze(-2).expand(*ids.shape, -1)).reshape(-1, x.shape[-1])
    y = y.reshape(-1, weight.shape[1])
    for e, matrix in enumerate(matrices(weight, quant_type)):
        mine = (ids == e).flatten()
        if mine.any():
            assert_linear_close(y[mine], rows[mine], matrix, context=f"{context} expert {e}")
