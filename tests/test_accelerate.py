"""accelerate's loading, offloading and device maps, and torch's FSDP, on packed models."""

import copy
import textwrap

import pytest
import safetensors.torch
import torch
from test_saving import INDICES, is_tied, packed_model, run, zero_model

import torch_qgemv

accelerate = pytest.importorskip("accelerate")
from accelerate.utils import compute_module_sizes, set_module_tensor_to_device  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SPLIT = {"embed": "cpu", "norm": "cpu", "layer": "disk", "head": "disk"}


@pytest.fixture
def checkpoint(tmp_path):
    model = packed_model()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return model, str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offload(offload, offload_buffers, prepare, tmp_path, device):
    model = packed_model(tied=True)
    y, packed = model(INDICES), model.layer.packed
    if prepare:
        torch_qgemv.prepare(model)
    folder = [tmp_path] if offload == "disk_offload" else []
    getattr(accelerate, offload)(model, *folder, execution_device=torch.device(device), offload_buffers=offload_buffers)
    assert model.layer.bias.is_meta and model.layer.stored.is_meta is offload_buffers
    for _ in range(2):
        torch.testing.assert_close(model(INDICES.to(device)).cpu(), y, rtol=1e-4, atol=1e-2)
    if not offload_buffers:
        assert torch.equal(model.layer.packed.cpu(), packed)


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
def test_dispatch_model(prepare, tmp_path):
    model = packed_model()
    y = model(INDICES)
    if prepare:
        torch_qgemv.prepare(model)
    accelerate.dispatch_model(model, SPLIT, offload_dir=tmp_path, offload_buffers=True)
    assert model.layer.stored.is_meta
    torch.testing.assert_close(model(INDICES), y)


def test_set_module_tensor_to_device(device):
    model, other = packed_model(), packed_model()
    y = model(INDICES)
    for name, value in list(model.state_dict().items()):
        set_module_tensor_to_device(other, name, "meta")
        assert other.state_dict()[name].is_meta
        set_module_tensor_to_device(other, name, device, value=value, dtype=torch.float16)
    assert other.layer.stored.dtype == torch.uint8 and other.layer.bias.dtype == torch.float16
    assert other.layer.stored.device.type == device
    torch.testing.assert_close(other.cpu().float()(INDICES), y, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, SPLIT], ids=["none", "one", "split"])
@pytest.mark.parametrize("empty", [None, "parameters", "all", "meta"])
def test_load_checkpoint_and_dispatch(empty, device_map, checkpoint, tmp_path):
    filled, path = checkpoint
    if empty == "meta":
        with torch.device("meta"):
            model = zero_model()
    elif empty:
        with accelerate.init_empty_weights(include_buffers=empty == "all"):
            model = zero_model()
    else:
        model = zero_model()
    if device_map is None and empty in ("all", "meta"):
        pytest.skip("without a device map accelerate loads in place, which the meta device can't")
    accelerate.load_checkpoint_and_dispatch(
        model, path, device_map=device_map, offload_folder=tmp_path, offload_buffers=True
    )
    assert model.layer.stored.is_meta is (device_map is SPLIT)
    assert torch.equal(model(INDICES), filled(INDICES))


def test_buffers_left_on_the_meta_device_raise(checkpoint, tmp_path):
    """accelerate loads no buffer of what a device map puts on the disk, unless offload_buffers=True."""
    with accelerate.init_empty_weights(include_buffers=True):
        model = zero_model()
    with pytest.raises(ValueError, match="packed is on the meta device"):
        accelerate.load_checkpoint_and_dispatch(model, checkpoint[1], device_map=SPLIT, offload_folder=tmp_path)


def test_checkpoint_of_another_type_raises(checkpoint):
    with pytest.raises(RuntimeError, match=r"layer\.packed is Q4_K in the state dict, but Q4_0 here"):
        accelerate.load_checkpoint_and_dispatch(zero_model("Q4_0"), checkpoint[1], device_map=None)
    model = accelerate.load_checkpoint_and_dispatch(zero_model("Q4_0"), checkpoint[1], device_map={"": "cpu"})
    with pytest.raises(ValueError, match=r"packed was made a Q4_K weight .* this module is for Q4_0"):
        model(INDICES)


def test_device_map_counts_packed_bytes():
    model = packed_model()
    sizes = compute_module_sizes(model, dtype=torch.float16)
    assert sizes["layer.packed"] == model.layer.packed.numel() and sizes["layer.bias"] == 1024
    assert accelerate.infer_auto_device_map(model, {"cpu": 2 * sizes[""]}) == {"": "cpu"}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerator_prepare(precision):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = packed_model(tied=True)
    expected = copy.deepcopy(model)(INDICES)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision=precision).prepare(model)
    assert is_tied(prepared)
    torch.testing.assert_close(prepared(INDICES), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_fully_shard_shards_parameters_and_replicates_packed_bytes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch
        import torch.multiprocessing as mp
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from test_saving import INDICES, packed_model
        from torch_qgemv import QuantLinear

        def work(rank, path):
            torch.set_num_threads(1)
            store = distributed.FileStore(path, 2)
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
            torch.manual_seed(0)
            model = packed_model()
            expected, packed = model(INDICES), model.layer.packed.clone()
            mesh = init_device_mesh("cpu", (2,))
            for module in (model.layer, model.head, model):
                fully_shard(module, mesh=mesh)
            assert isinstance(model.layer, QuantLinear) and isinstance(model.layer.bias, DTensor)
            y = model(INDICES)
            assert torch.equal(y, expected)
            y.sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            assert not torch.equal(model(INDICES), y)
            state = model.state_dict()
            assert isinstance(state["layer.bias"], DTensor) and torch.equal(state["layer.packed"], packed)
            model.load_state_dict(state)
            distributed.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, args=(sys.argv[1],), nprocs=2)
            print("done")
        """)
    )
    assert run(script, tmp_path / "store") == "done"
