"""torch.compile, torch.export and AOTInductor on packed models: what is compiled how often, and that it is right."""

import collections
import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from formats import TYPES, random_packed, random_x
from torch import nn
from torch.nn import functional as F

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear

BATCHES = (1, 2, 3, 7)
FIVE_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS")


@pytest.fixture(autouse=True)
def limits():
    """Each test starts without compiled code and fails where torch would fall back to eager at a recompile limit."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def packed_layer(index, shape=(256, 256), types=FIVE_TYPES):
    quant_type = types[index % len(types)]
    return QuantLinear.from_packed(random_packed(quant_type, *shape, seed=index), quant_type, torch.randn(shape[0]))


def compiled_module(module, **options):
    module.compile(**options)
    return module


def compiled_forward(module, **options):
    module.forward = torch.compile(module.forward, **options)
    return module


WAYS = [torch.compile, compiled_module, compiled_forward]


def random_batch(columns, batch):
    return random_x((batch, columns))


def run_batches(function, make_input=None):
    make_input = make_input or partial(random_batch, 256)
    with torch.no_grad():
        return [function(make_input(batch)) for batch in BATCHES]


# ---- how often it compiles


@pytest.mark.parametrize("way", WAYS)
def test_layer_by_layer_five_types_stay_below_the_limit(way):
    counter = torch._dynamo.testing.CompileCounter()
    layers = [packed_layer(index) for index in range(20)]
    expected = run_batches(nn.Sequential(*layers))
    model = nn.Sequential(*(way(layer, backend=counter, fullgraph=True) for layer in layers))
    for y, exact in zip(run_batches(model), expected, strict=True):
        assert torch.equal(y, exact)
    assert counter.frame_count == 2 * len(FIVE_TYPES)  # for one row and for any number of rows


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_of_all_types_stay_below_the_limit(way):
    counter = torch._dynamo.testing.CompileCounter()
    for quant_type in TYPES:
        layer = QuantEmbedding.from_packed(random_packed(quant_type, 9, 256), quant_type)
        layer = way(layer, backend=counter, fullgraph=True)
        run_batches(layer, torch.arange)
    assert counter.frame_count == 2 * len(TYPES)


def most_compilations(layers):
    """How often the code object is compiled that is compiled most often, when the layers are compiled one by one."""
    torch._dynamo.reset()
    counters = collections.defaultdict(torch._dynamo.testing.CompileCounter)
    for layer in layers:
        counter = counters[type(layer).forward.__code__]
        run_batches(torch.compile(layer, backend=counter, fullgraph=True), partial(random_batch, layer.in_features))
    return max(counter.frame_count for counter in counters.values())


def test_layer_by_layer_never_recompiles_more_than_linear():
    shapes = [(256, 256), (512, 256), (256, 512), (512, 512)]
    packed = [packed_layer(index, shape) for shape in shapes for index in range(5)]
    linear = [nn.Linear(k, n) for n, k in shapes for _ in range(5)]
    assert most_compilations(packed) <= most_compilations(linear) == 8  # the default limit


def test_whole_model_compiles_twice():
    counter = torch._dynamo.testing.CompileCounter()
    model = nn.Sequential(*(packed_layer(index, types=TYPES) for index in range(24)))
    expected = run_batches(model)
    for y, exact in zip(run_batches(torch.compile(model, backend=counter, fullgraph=True)), expected, strict=True):
        assert torch.equal(y, exact)
    assert counter.frame_count == 2


class Block(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


def test_block_by_block_two_mixtures_stay_below_the_limit():
    """As in a Q4_K_M model: some blocks have a Q6_K where others have a Q4_K."""
    counter = torch._dynamo.testing.CompileCounter()
    second = ("Q4_K", "Q6_K")
    model = nn.Sequential(*(Block(packed_layer(0), packed_layer(index, types=second)) for index in range(20)))
    run_batches(nn.Sequential(*(torch.compile(block, backend=counter, fullgraph=True) for block in model)))
    assert counter.frame_count == 4


# ---- a forward for each type


def test_each_type_has_a_forward_of_its_own():
    layers = [packed_layer(index) for index in range(10)]
    assert len({layer.forward.__code__ for layer in layers}) == len(FIVE_TYPES)
    assert layers[0].forward.__code__.co_name == "forward_Q4_K" and type(layers[0]) is type(layers[5])
    assert list(inspect.signature(layers[0].forward).parameters) == ["x"]
    assert type(layers[0]).__name__ == "QuantLinear" and isinstance(layers[0], QuantLinear)


class Doubled(QuantLinear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("cls", [QuantLinear, Doubled])
def test_copies_and_pickles_are_of_the_same_class(cls):
    layer, x = packed_layer(0), random_x((2, 256))
    layer = cls.from_packed(layer.packed, layer.quant_type, layer.bias)
    twins = [copy.copy(layer), copy.deepcopy(layer)]
    twins += [pickle.loads(pickle.dumps(layer, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in (*twins, type(layer).from_packed(layer.packed, layer.quant_type, layer.bias)):
        assert type(twin) is type(layer) and torch.equal(twin(x), layer(x))


def test_forward_can_be_overridden():
    layer, x = packed_layer(0), random_x((2, 256))
    doubled = Doubled.from_packed(layer.packed, layer.quant_type, layer.bias)
    assert torch.equal(doubled(x), 2 * layer(x))
    assert torch.equal(torch.compile(doubled, fullgraph=True, backend="eager")(x), 2 * layer(x))
    counter = torch._dynamo.testing.CompileCounter()
    for layer in map(packed_layer, range(5)):
        doubled = Doubled.from_packed(layer.packed, layer.quant_type, layer.bias)
        run_batches(torch.compile(doubled, backend=counter, fullgraph=True))
    assert counter.frame_count == 10
    layer.forward = lambda x: x  # as hooks do
    assert layer(x) is x
    del layer.forward
    assert torch.equal(2 * layer(x), doubled(x))


# ---- that it is right


class Tied(nn.Module):
    """An embedding, a packed layer and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = QuantEmbedding.from_packed(random_packed("Q6_K", 11, 256), "Q6_K")
        self.layer = packed_layer(0)

    def forward(self, indices):
        x = self.embed(indices)
        return F.linear(self.layer(x).to(self.embed.weight.dtype), self.embed.weight)


def test_aot_eager_with_dynamic_batch(device):
    model = Tied().to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in BATCHES:
        indices = torch.arange(batch, device=device).view(1, batch)
        assert torch.equal(compiled(indices), model(indices))
    gradients = [torch.autograd.grad(run(indices).sum(), model.layer.bias)[0] for run in (model, compiled)]
    torch.testing.assert_close(*gradients)


def graph_targets(model, *inputs):
    """The operators in the graph that a compiler gets after dead code is gone."""
    graphs = []

    def backend(graph, inputs):
        keep = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda g, _: graphs.append(g) or g)
        return keep(graph, inputs)

    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    return [str(node.target) for node in graphs[0].graph.nodes if "qgemv" in str(node.target)]


def test_compiled_head_on_an_embedding_unpacks_nothing():
    targets = graph_targets(Tied(), torch.arange(3))
    assert sorted(targets) == [f"torch_qgemv.{name}.default" for name in ("embedding", "linear", "linear")]


def test_compiled_use_of_the_matrix():
    layer = packed_layer(0)

    def use(x):
        return x @ layer.weight.T + layer.weight.float().mean() + layer.weight[0, 0], layer.weight.shape

    x = random_x((2, 256))
    y, shape = torch.compile(use, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, use(x)[0], rtol=1e-4, atol=1e-5)
    assert shape == (256, 256)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_batch(strict, device):
    model = Tied().to(device).requires_grad_(False)
    batch = torch.export.Dim("batch")
    indices = torch.arange(6, device=device).view(3, 2)
    program = torch.export.export(model, (indices,), dynamic_shapes=({0: batch},), strict=strict)
    assert "torch_qgemv.linear.default" in [str(node.target) for node in program.graph.nodes]
    for count in BATCHES:
        indices = torch.arange(2 * count, device=device).remainder(11).view(count, 2)
        assert torch.equal(program.module()(indices), model(indices))
    assert {name for name in program.state_dict if "packed" in name} == {"embed.packed", "layer.packed"}


def test_exported_program_is_saved_and_loaded(tmp_path):
    model = Tied().requires_grad_(False)
    program = torch.export.export(model, (torch.arange(3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(loaded(torch.arange(5)), model(torch.arange(5)))


@pytest.mark.slow
def test_aot_inductor_package(tmp_path):
    model = Tied().requires_grad_(False)
    program = torch.export.export(model, (torch.arange(3),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for batch in BATCHES:
        torch.testing.assert_close(loaded(torch.arange(batch)), model(torch.arange(batch)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fakes_have_the_strides_of_the_real_outputs(dtype, device):
    """Contiguous, whatever x's strides and memory format are."""
    packed = random_packed("Q4_K", 5, 256).to(device)
    dense = random_x((2, 3, 4, 256), dtype).to(device)
    layouts = {
        "transposed": dense.transpose(0, 2),
        "channels_last": dense.contiguous(memory_format=torch.channels_last),
        "columns first": dense[0, 0].T.contiguous().T,
        "expanded": dense[:1].expand(6, 3, 4, 256),
        "sliced": dense[:, ::2, 1:],
        "empty": dense[:0],
    }
    indices = torch.arange(4, device=device).view(2, 2).T
    with torch._subclasses.FakeTensorMode() as mode:
        for name, x in layouts.items():
            fake = torch_qgemv.linear(mode.from_tensor(x), mode.from_tensor(packed), "Q4_K")
            assert fake.is_contiguous() and fake.shape == (*x.shape[:-1], 5) and fake.dtype == dtype, name
        fake = torch_qgemv.embedding(mode.from_tensor(indices), mode.from_tensor(packed), "Q4_K", dtype)
        assert fake.is_contiguous() and fake.shape == (2, 2, 256)
    for name, x in layouts.items():
        y = torch_qgemv.linear(x, packed, "Q4_K")
        assert y.is_contiguous() and y.shape == (*x.shape[:-1], 5), name
    assert torch_qgemv.embedding(indices, packed, "Q4_K", dtype).is_contiguous()
