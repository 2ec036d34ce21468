"""expert_linear on MPS: which kernels run, what they are given, how rows are sorted."""

import random

import pytest
import torch
from experts import assert_experts_close, random_experts, random_ids
from formats import TYPES, odd_view, random_x

import torch_qgemv

ops = torch.ops.torch_qgemv
Q4_0, Q4_K = TYPES[0], TYPES[7]


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_any_distribution(seed, mps):
    """Each row is in one tile, whatever the experts' shares and wherever ids that name none stand."""
    chance = random.Random(seed)
    for _ in range(6):
        E, rows = chance.randint(1, 12), chance.randint(2, 70)
        weight, x = random_experts(Q4_0, E, 2, 32), random_x((rows, 32))
        share = [chance.choice((0, 1, 9)) for _ in range(E + 1)]
        share[chance.randrange(E)] += 1
        ids = torch.tensor(chance.choices([*range(E), E + 3], share, k=rows))
        y = torch_qgemv.expert_linear(x.to(mps), weight.to(mps), ids.to(mps), Q4_0).cpu()
        assert y[ids >= E].isnan().all()
        assert_experts_close(y, x, weight, ids, Q4_0, f"E={E} ids={ids.tolist()}")


@pytest.fixture
def launches(record):
    """Calls give the kernels launched since the last call."""
    return lambda: [launch.kernel for launch in record()]


@pytest.mark.parametrize("rows_each, tiles", [(1, 3), (9, 3), (33, 6)])
def test_as_many_tiles_as_there_can_be(rows_each, tiles, mps, simulator):
    """Each expert, and the rows of none, has a tile that isn't full."""
    weight, ids = random_experts(Q4_0, 2, 3, 32), torch.tensor([0, 1, 2] * rows_each)
    x = random_x((len(ids), 32))
    arguments = x.to(mps), weight.to(mps), ids.to(mps), Q4_0
    simulator.clear()
    y = torch_qgemv.expert_linear(*arguments).cpu()
    assert max(simulator.dispatches()[1].groups) == tiles
    assert y[ids == 2].isnan().all()
    assert_experts_close(y, x, weight, ids, Q4_0)


@pytest.mark.parametrize("plain", [False, True])
def test_the_kernels_that_run(plain, mps, launches):
    weight = random_experts(Q4_K, 16, 9, 256).to(mps)
    if plain:
        weight = odd_view(weight)
    end = "_plain" if plain else ""
    for rows, kernels in (
        *(((1, 8), [f"expert_gemv_Q4_K_half{end or '_r4_s2_k1'}"]), ((1, 9), ["routes", "expert_tiles"])),
        *(((16, 8), ["routes", "expert_tiles"]), ((129,), ["routes", "expert_matmul"])),
    ):
        x, ids = random_x((rows[0], 256), torch.half).to(mps), random_ids(rows, 16).to(mps)
        expected = [
            name if "gemv" in name else f"{name}_Q4_K_half{end if name != 'routes' else ''}" for name in kernels
        ]
        launches()
        y = torch_qgemv.expert_linear(x, weight, ids, Q4_K)
        assert launches() == expected
        ops.expert_linear_transposed(y, weight, ids, int(Q4_K))
        assert launches()[-2:] == ["routes_Q4_K_half", f"expert_transposed_Q4_K_half{end}"]


def test_a_thousand_calls_share_an_encoder_and_never_wait(mps, simulator):
    weight, x = random_experts(Q4_0, 4, 3, 32).to(mps), random_x((5, 32)).to(mps)
    ids = random_ids((5,), 4).to(mps)
    torch_qgemv.expert_linear(x, weight, ids, Q4_0)
    simulator.clear()
    before = simulator.counters()["live"]
    for _ in range(500):
        torch_qgemv.expert_linear(x, weight, ids, Q4_0)
    after = simulator.counters()
    assert after["dispatches"] == 1000 and after["encoders"] <= 1 and after["commits"] == 0
    assert after["live"] == before


def test_rows_of_several_experts_are_not_copied(mps, simulator):
    weight, x = random_experts(Q4_0, 4, 3, 32).to(mps), random_x((6, 32)).to(mps)
    ids = random_ids((6, 2), 4).to(mps)
    simulator.clear()
    y = torch_qgemv.expert_linear(x, weight, ids, Q4_0)
    routes, product = simulator.dispatches()
    order = routes.buffers[1].storage
    assert order == routes.buffers[2].storage and routes.buffers[2].offset - routes.buffers[1].offset == 4 * 12
    places = [(weight, 0), (x, 1), (y, 4)]
    assert [product.buffers[i].storage for _, i in places] == [t.untyped_storage().data_ptr() for t, _ in places]
    assert [product.buffers[i].storage for i in (2, 3)] == [order, order]
