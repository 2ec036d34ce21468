"""expert_linear against float64: rows of x, each multiplied by its expert's weight."""

import pytest
import torch
from experts import assert_experts_close, random_experts, random_ids
from formats import TYPES, block_size, odd_view, random_x, type_size

import torch_qgemv

ops = torch.ops.torch_qgemv
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Q4_0, Q8_0, Q4_K = TYPES[0], TYPES[4], TYPES[7]
by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}


def check(x, weight, ids, quant_type, device, context=""):
    y = torch_qgemv.expert_linear(x.to(device), weight.to(device), ids.to(device), quant_type)
    assert_experts_close(y, x, weight, ids, quant_type, context)
    return y


# ---- Numbers


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_all_types_and_dtypes(quant_type, dtype, device):
    """One row, few and many, of one block and of more."""
    for N, blocks, E, rows in ((5, 1, 3, (1,)), (33, 3, 9, (4,)), (16, 2, 4, (5, 3)), (35, 3, 2, (70,))):
        weight = random_experts(quant_type, E, N, blocks * block_size(quant_type))
        x = random_x((*rows, blocks * block_size(quant_type)), dtype, seed=N)
        context = f"N={N} blocks={blocks} E={E} rows={rows}"
        check(x, weight, random_ids(rows, E, seed=N), quant_type, device, context)
        check(
            x,
            odd_view(weight.to(device)),
            random_ids(rows, E, seed=N),
            quant_type,
            device,
            f"{context} at an odd address",
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], **by_name)
@pytest.mark.parametrize(
    "x_shape, ids_shape",
    [
        *[((256,), ()), ((256,), (3,)), ((4, 256), (4,)), ((1, 256), (1, 4)), ((4, 256), (4, 2))],
        *[((4, 2, 256), (4, 2)), ((2, 3, 256), (2, 3, 4)), ((40, 256), (40, 3)), ((40, 3, 256), (40, 3))],
    ],
)
def test_one_expert_a_row_or_several(x_shape, ids_shape, dtype, device):
    """The last is the second matrix of an expert's block, with the rows that the first one made."""
    weight = random_experts(Q4_K, 9, 7, 256)
    y = check(random_x(x_shape), weight, random_ids(ids_shape, 9, dtype), Q4_K, device)
    assert y.is_contiguous()


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_one_expert_is_linear(rows, device):
    weight, x = random_experts(Q8_0, 1, 19, 96), random_x((rows, 96))
    check(x, weight, torch.zeros(rows, dtype=torch.long), Q8_0, device)


@pytest.mark.parametrize("ids", [[5], [2, 7], [7, 7, 7, 1], [3] * 20, [0, 9] * 30, [9, 0, 5, 5, 9]])
def test_experts_without_rows_are_not_read(ids, device):
    """All of their weights are NaN: nothing of them gets into another expert's rows."""
    weight, ids = random_experts(Q8_0, 10, 35, 64), torch.tensor(ids)
    for e in set(range(10)) - set(ids.tolist()):
        weight[e] = 255
    check(random_x((len(ids), 64)), weight, ids, Q8_0, device)


@pytest.mark.parametrize("E, rows", [(2, 300), (3, 1500), (40, 1100), (300, 40)])
def test_many_rows_and_many_experts(E, rows, device):
    """More rows of an expert than are multiplied at a time, more rows in all, more experts than rows."""
    weight = random_experts(Q4_0, E, 3, 32)
    ids = random_ids((rows,), E)
    ids[: rows // 2] = E - 1
    check(random_x((rows, 32)), weight, ids, Q4_0, device)


def test_views_of_weight(device):
    size = type_size(Q4_K)
    weight = random_experts(Q4_K, 6, 20, 1024).to(device)
    for rows in (2, 30):
        ids, x = random_ids((rows,), 3), random_x((rows, 1024))
        for view in (weight[:3], weight[3:], weight[::2], weight[:3, 7:], weight[:3, ::3], weight[:1].expand(3, -1, -1),
                     weight[:3].transpose(1, 2).contiguous().transpose(1, 2)):  # fmt: skip
            check(x, view, ids, Q4_K, device)
        check(x[:, :512], weight[:3, :, 2 * size :], ids, Q4_K, device)
        apart = torch.zeros(3, 20 * 4 * size + 1, dtype=torch.uint8, device=device)  # no expert but the first aligned
        apart = apart[:, : 20 * 4 * size].unflatten(1, (20, -1))
        check(x, apart.copy_(weight[:3]), ids, Q4_K, device)


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
@pytest.mark.parametrize("experts", [3, 16])
def test_strided_x_and_ids(dtype, experts, device):
    weight = random_experts(Q4_K, experts, 9, 256).to(device)
    base, numbers = random_x((6, 520), dtype).to(device), random_ids((6, 8), experts).to(device)
    for x in (base[:, 3:259], base[::2, 1:513:2], base[2:3, :256].expand(6, 256), base[:, :256].unflatten(0, (2, 3))):
        shape = x.shape[:-1]
        for ids in (numbers[: len(x), 0] if len(shape) == 1 else numbers[:2, :3], numbers.T[: shape.numel(), 1]):
            ids = ids.reshape(shape)
            y = torch_qgemv.expert_linear(x, weight, ids, Q4_K)
            assert_experts_close(y, x, weight, ids, Q4_K)
    y = torch_qgemv.expert_linear(base[:, :256], weight, numbers[:, ::3], Q4_K)
    assert_experts_close(y, base[:, :256], weight, numbers[:, ::3], Q4_K)


def test_nothing_to_do(device):
    weight = random_experts(Q4_K, 3, 5, 256).to(device)
    x, ids = torch.ones(2, 256, device=device), torch.tensor([0, 2], device=device)
    expert_linear = torch_qgemv.expert_linear
    assert expert_linear(x[:0], weight, ids[:0], Q4_K).shape == (0, 5)
    assert expert_linear(x, weight, ids[:, None].expand(2, 0), Q4_K).shape == (2, 0, 5)
    assert expert_linear(x, weight[:, :0], ids, Q4_K).shape == (2, 0)
    assert expert_linear(x[:0], weight[:0], ids[:0], Q4_K).shape == (0, 5)
    assert torch.equal(expert_linear(x[:, :0], weight[..., :0], ids, Q4_K), torch.zeros(2, 5, device=device))


@pytest.mark.parametrize("rows", [2, 40])
def test_infinities_and_nans_in_x_stay_in_their_row(rows, device):
    weight, ids = random_experts(Q4_K, 5, 9, 512), random_ids((rows,), 5)
    x = random_x((rows, 512))
    x[1, 300] = torch.nan
    y = torch_qgemv.expert_linear(x.to(device), weight.to(device), ids.to(device), Q4_K).cpu()
    keep = [i for i in range(rows) if i != 1]
    assert y[1].isnan().all()
    assert_experts_close(y[keep], x[keep], weight, ids[keep], Q4_K)


def test_tiny_and_huge_x(device):
    """Those that are too small for the CPU's integers too."""
    weight, ids, x = random_experts(Q8_0, 5, 9, 64), random_ids((12,), 5), random_x((12, 64))
    x[3] *= 1e-33
    x[4] *= 1e30
    if device == "cpu":  # the GPU's sums of numbers below 1e-38 lose digits, as PyTorch's own do
        check(x, weight, ids, Q8_0, device)
    keep = [i for i in range(12) if i != 3]
    check(x[keep], weight, ids[keep], Q8_0, device)


# ---- The CPU


@pytest.mark.parametrize("rows", [(1, 8), (40,)])
def test_same_result_on_any_number_of_threads(rows):
    weight, ids = random_experts(Q4_K, 16, 130, 512), random_ids(rows, 16)
    x = random_x((rows[0], 512))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch_qgemv.expert_linear(x, weight, ids, Q4_K))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [3, 70])
def test_interleaved_experts(rows):
    weight, ids, x = random_experts(Q4_K, 4, 35, 768), random_ids((rows,), 4), random_x((rows, 768))
    interleaved = torch.stack([ops.interleave(each, int(Q4_K)) for each in weight])
    assert interleaved.shape == (4, 3, 35, type_size(Q4_K))
    y = torch_qgemv.expert_linear(x, interleaved, ids, Q4_K)
    assert torch.equal(y, torch_qgemv.expert_linear(x, weight, ids, Q4_K))
    assert_experts_close(y, x, weight, ids, Q4_K)
    grad_y = random_x((rows, 35))
    grad_x = ops.expert_linear_transposed(grad_y, interleaved, ids, int(Q4_K))
    assert torch.equal(grad_x, ops.expert_linear_transposed(grad_y, weight, ids, int(Q4_K)))


def test_experts_of_one_block_are_not_interleaved(device):
    """[E, N, bytes of a block] is what an interleaved matrix would look like."""
    check(random_x((4, 256)), random_experts(Q4_K, 3, 9, 256), random_ids((4,), 3), Q4_K, device)


# ---- Errors


def test_an_id_that_is_no_expert(device):
    """The CPU raises; on MPS its row is NaN, and the others are right."""
    weight = random_experts(Q4_K, 4, 40, 256)
    for dtype, bad in ((torch.int32, [-1, 4, 2**31 - 1, -(2**31)]), (torch.int64, [4, 2**32, 2**40, -(2**63)])):
        for good in ([], [2] * 9, [0, 3] * 40):
            for number in bad:
                ids = torch.tensor([*good, number, *good], dtype=dtype)
                x = random_x((len(ids), 256))
                arguments = x.to(device), weight.to(device), ids.to(device), Q4_K
                if device == "cpu":
                    with pytest.raises(
                        IndexError, match=f"expert_linear: expert {number} of ids is out of range for 4"
                    ):
                        torch_qgemv.expert_linear(*arguments)
                    continue
                y = torch_qgemv.expert_linear(*arguments).cpu()
                keep = [i for i in range(len(ids)) if i != len(good)]
                assert y[len(good)].isnan().all()
                assert_experts_close(y[keep], x[keep], weight, ids[keep], Q4_K)
    no_experts = (
        torch.empty(0, 5, 144, dtype=torch.uint8, device=device),
        torch.zeros(2, dtype=torch.long, device=device),
    )
    for rows, op in ((256, ops.expert_linear), (5, ops.expert_linear_transposed)):
        arguments = torch.ones(2, rows, device=device), *no_experts, int(Q4_K)
        if device == "cpu":
            with pytest.raises(IndexError, match="out of range for 0 experts"):
                op(*arguments)
        else:
            assert op(*arguments).isnan().all()


def test_errors(device):
    x, ids = torch.zeros(2, 256, device=device), torch.zeros(2, dtype=torch.long, device=device)
    weight = torch.zeros(3, 64, 144, dtype=torch.uint8, device=device)

    def refused(error, match, x=x, weight=weight, ids=ids, quant_type=12):
        for op in (ops.expert_linear, torch_qgemv.expert_linear):
            with pytest.raises(error, match=match):
                op(x, weight, ids, quant_type)

    refused(
        ValueError,
        r"x must be \[\.\.\., K\] with K = 256, got \[2, 100\]; weight \[3, 64, 144\] of Q4_K has E = 3",
        x=x[:, :100],
    )
    refused(ValueError, r"x must be .* got \[\]", x=x[0, 0])
    refused(ValueError, r"weight must be \[E, N, row_bytes\], got \[64, 144\]", weight=weight[0])
    refused(ValueError, r"weight must be \[E, N, row_bytes\], got \[1, 1, 3, 64, 144\]", weight=weight[None, None])
    refused(ValueError, r"rows of 143 bytes", weight=weight[..., :143])
    refused(TypeError, r"uint8.*got Char", weight=weight.to(torch.int8))
    refused(TypeError, "x must be float32, float16 or bfloat16, got Int", x=x.int())
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        refused(TypeError, "ids must be int64 or int32, got ", ids=ids.to(dtype))
    for bad in (ids[:1], ids[0], ids[None], ids[:, None, None], ids[None].expand(3, 2)):
        shape = str(list(bad.shape)).replace("[", r"\[").replace("]", r"\]")
        refused(ValueError, rf"ids must have an expert.* for each row of x \[2, 256\], got {shape}", ids=bad)
    with pytest.raises(ValueError, match="quant_type 99 is not a supported GGUF type"):
        ops.expert_linear(x, weight, ids, 99)
    grad_y = torch.zeros(2, 64, device=device)
    for bad in (grad_y[:, :63], grad_y[:1], grad_y[0], grad_y[:, None]):
        with pytest.raises(
            ValueError, match=r"expert_linear_transposed: grad_y must be \[\.\.\., N\] with N = 64 and a"
        ):
            ops.expert_linear_transposed(bad, weight, ids, 12)
    with pytest.raises(TypeError, match="grad_y must be float32, float16 or bfloat16"):
        ops.expert_linear_transposed(grad_y.long(), weight, ids, 12)


def test_devices_are_not_mixed(device):
    x, ids = torch.zeros(2, 256, device=device), torch.zeros(2, dtype=torch.long, device=device)
    weight = torch.zeros(3, 5, 144, dtype=torch.uint8, device=device)
    for name, arguments in (("x", (x.to("meta"), weight, ids)), ("ids", (x, weight, ids.to("meta")))):
        with pytest.raises((ValueError, RuntimeError), match=f"{name} is on meta|device"):
            ops.expert_linear(*arguments, 12)
