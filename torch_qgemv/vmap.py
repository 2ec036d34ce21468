"""torch.func.vmap over the operators."""

from functools import partial

import torch

ops = torch.ops.torch_qgemv


def _one_call_each(op, info, in_dims, args):
    """For a batch of packed weights, as of an ensemble's models, or of biases."""
    samples = [
        [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    ]
    return torch.stack([op(*sample) for sample in samples]), 0


def _rows(op, info, in_dims, rows, *args):
    """A batch of the first argument, rows of x, of grad_y or of indices, is just more rows."""
    if in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):
        return op(rows.movedim(in_dims[0], 0), *args), 0
    return _one_call_each(op, info, in_dims, (rows, *args))


def _fused_linear(info, in_dims, x, weights, quant_types, biases):
    """Each product as if it were alone."""
    x_dim, weight_dims, _, bias_dims = in_dims
    products = []
    for weight, quant_type, bias, *dims in zip(weights, quant_types, biases, weight_dims, bias_dims, strict=True):
        args = x, weight, quant_type, bias
        if x_dim is None and dims == [None, None]:
            products.append((ops.linear.default(*args), None))
        else:
            products.append(_rows(ops.linear.default, info, (x_dim, dims[0], None, dims[1]), *args))
    return tuple(map(list, zip(*products, strict=True)))


def _register_experts(op):
    """A batch of rows or of ids is just more rows, each with its expert."""

    def rule(info, in_dims, rows, weight, ids, quant_type):
        if in_dims[1] is not None:
            return _one_call_each(op, info, in_dims, (rows, weight, ids, quant_type))
        rows, ids = (
            arg.expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
            for arg, dim in ((rows, in_dims[0]), (ids, in_dims[2]))
        )
        return op(rows, weight, ids, quant_type), 0

    torch.library.register_vmap(op, rule)


def _dequantize(info, in_dims, *args):
    return _one_call_each(ops.dequantize.default, info, in_dims, args)


for _op in (ops.linear.default, ops.linear_transposed.default, ops.embedding.default):
    torch.library.register_vmap(_op, partial(_rows, _op))
torch.library.register_vmap(ops.fused_linear.default, _fused_linear)
for _op in (ops.expert_linear.default, ops.expert_linear_transposed.default):
    _register_experts(_op)
torch.library.register_vmap(ops.dequantize.default, _dequantize)
