"""Contract under test: a training loop may recompute, offload, compile, stop and resume without a change of bits, and
nothing of a quantized weight lives between forward and backward (``batched_mm``, which gathers weights, excepted).
"""

import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from bits import assert_same_bits
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from small_modules import fill
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from twins import assert_equal_tensors, experts_and_inputs, outputs_and_gradients, run_experts

import quads_qat as qq

DISPATCHES = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
Case = tuple[nn.Module, Callable[[nn.Module], Tensor], list[Tensor]]


class Attention(nn.Module):
    """A scale group whose members read each other's weights."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(64, 32, bias=name == "q"))
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x).float().sigmoid() * self.k_proj(x) + self.v_proj(x)


def case(kind: str, mode: str = "w4a16", dtype: torch.dtype = torch.bfloat16) -> Case:
    """A converted module, how to run it, and its float inputs."""
    if kind == "linear":
        x = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        return qq.convert(Attention().to(dtype), mode), lambda m: m(x), [x]
    arch, _, implementation = kind.partition(" ")
    experts, inputs = experts_and_inputs(arch, implementation, dtype)
    return qq.convert(experts, mode), lambda m: run_experts(m, inputs), inputs[:2]


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --------------------------------------------------------------------------------------------------------------- memory


class QuantizedWeights(TorchDispatchMode):
    """Counts calls of the quantizers while it is on, and knows which of their results are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "quads_qat" and "fake_quantize" in func.name():
            self.storages.append(StorageWeakRef(out.untyped_storage()))
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self.storages)


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize(
    "kind",
    ["linear", "qwen3_moe eager", "qwen3_moe grouped_mm", "gpt_oss eager", "gpt_oss grouped_mm", "nemotron_h eager"],
)
def test_no_quantized_tensor_is_alive_between_forward_and_backward(kind: str, mode: str):
    model, run, inputs = case(kind, mode)
    expected = outputs_and_gradients(model, run, inputs)
    forward, backward = QuantizedWeights(), QuantizedWeights()
    with forward:
        out = run(model)
    assert forward.storages
    assert forward.alive() == 0
    with backward:
        out.sum().backward()
    assert backward.storages
    assert backward.alive() == 0
    assert_equal_tensors(outputs_and_gradients(model, run, inputs), expected)


def test_batched_mm_keeps_quantized_weights_as_documented():
    model, run, _ = case("qwen3_moe batched_mm")
    with QuantizedWeights() as watch:
        out = run(model)
    assert out.requires_grad
    assert watch.alive() == 0  # the stacks themselves are recomputed too: what lives are the gathered copies


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("kind", ["linear", "qwen3_moe grouped_mm", "gpt_oss grouped_mm"])
def test_linears_and_grouped_experts_save_inputs_and_master_weights(kind: str, mode: str):
    model, run, _ = case(kind, mode)
    masters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(model)
    others = [t for t in saved if t.untyped_storage().data_ptr() not in masters]
    weights = [p for n, p in model.named_parameters() if "bias" not in n]
    weights += [p[0] for p in weights if p.ndim == 3]  # nor one of a single expert
    shapes = {shape for w in weights for shape in (w.shape, w.mT.shape)}
    assert masters & {t.untyped_storage().data_ptr() for t in saved}
    assert not shapes & {t.shape for t in others if t.ndim >= 2}
    assert out.requires_grad


def test_the_eager_loop_rebuilds_each_weight_once():
    model, run, _ = case("qwen3_moe eager")
    out = run(model)
    with QuantizedWeights() as watch:
        out.sum().backward()
    assert len(watch.storages) == 2


@DISPATCHES
def test_hooks_that_offload_saved_tensors_still_get_them_and_no_bit_changes(implementation: str):
    model, run, inputs = case(f"qwen3_moe {implementation}")
    calls: list[int] = []

    def offloaded(module: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append(1), t.clone())[1], lambda t: t):
            return run(module)

    with deterministic(implementation == "batched_mm"):
        expected = outputs_and_gradients(model, run, inputs)
        assert_equal_tensors(outputs_and_gradients(model, offloaded, inputs), expected)
    assert len(calls) > 4


@pytest.mark.parametrize("kind", ["linear", "qwen3_moe eager", "qwen3_moe grouped_mm"])
def test_changing_a_weight_between_forward_and_backward_is_an_error(kind: str):
    model, run, _ = case(kind)
    out = run(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place between forward and backward|modified by an inplace"):
        out.sum().backward()


def test_an_eager_forward_can_be_differentiated_twice_if_its_graph_is_kept():
    model, run, inputs = case("qwen3_moe eager")
    out = run(model)
    out.sum().backward(retain_graph=True)
    first = inputs[0].grad.clone()
    out.sum().backward()
    assert torch.equal(inputs[0].grad, 2 * first)


# -------------------------------------------------------------------------------------------------------------- compile

COMPILED = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("linear", torch.bfloat16),
        ("linear", torch.float32),
        ("qwen3_moe grouped_mm", torch.bfloat16),
        ("qwen3_moe grouped_mm", torch.float32),
        ("gpt_oss grouped_mm", torch.bfloat16),
        ("nemotron_h grouped_mm", torch.bfloat16),
    ],
)


@COMPILED
def test_compiled_as_one_graph_it_gives_the_eager_bits_and_is_compiled_once(kind: str, dtype: torch.dtype):
    torch._dynamo.reset()
    model, run, inputs = case(kind, dtype=dtype)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(4):
        expected = outputs_and_gradients(model, run, inputs)
        found = outputs_and_gradients(model, lambda _: run(compiled), inputs)
        assert_equal_tensors(found, expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.sign(), alpha=0.01)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["linear", "qwen3_moe eager", "qwen3_moe batched_mm"])
def test_w4a4_and_the_other_dispatches_compile_with_the_eager_bits(kind: str):
    torch._dynamo.reset()
    model, run, inputs = case(kind, "w4a4" if kind == "linear" else "w4a16")
    compiled = torch.compile(model, fullgraph=kind == "linear", backend="aot_eager")
    with deterministic(True):
        expected = outputs_and_gradients(model, run, inputs)
        assert_equal_tensors(outputs_and_gradients(model, lambda _: run(compiled), inputs), expected)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@COMPILED
def test_a_compiled_forward_saves_no_quantized_weight(kind: str, dtype: torch.dtype, partition: Callable):
    torch._dynamo.reset()
    model, run, _ = case(kind, dtype=dtype)
    graphs: dict[str, fx.Graph] = {}

    def keep(name: str) -> Callable:
        def compiler(module: fx.GraphModule, inputs: Any) -> Any:
            graphs[name] = module.graph
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=partition)
    run(torch.compile(model, fullgraph=True, backend=backend)).sum().backward()
    (output,) = [n for n in graphs["forward"].nodes if n.op == "output"]
    quantizers = [n for n in graphs["forward"].nodes if "quads_qat.fake_quantize" in str(n.target)]
    views = {n for q in quantizers for n in views_of(q)}
    assert quantizers
    assert not views & set(output.all_input_nodes)
    assert any("fake_quantize_backward" in str(n.target) for n in graphs["backward"].nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "qwen3_moe grouped_mm", "gpt_oss grouped_mm", "nemotron_h grouped_mm"])
def test_on_cuda_inductor_gives_the_eager_results_in_bfloat16_precision(kind: str):
    torch._dynamo.reset()
    model, _, inputs = case(kind)
    model = model.cuda()
    inputs = [x.detach().cuda().requires_grad_() for x in inputs]
    index = experts_and_inputs("qwen3_moe", "eager")[1][2].cuda()
    arguments = inputs if kind == "linear" else [inputs[0], index, inputs[1]]
    compiled = torch.compile(model, fullgraph=True)
    expected = outputs_and_gradients(model, lambda m: m(*arguments), inputs)
    found = outputs_and_gradients(model, lambda _: compiled(*arguments), inputs)
    for name, wanted in expected.items():
        if wanted is not None:  # inductor fuses what lies between GEMMs and rounds it less often: some bfloat16 ulps
            torch.testing.assert_close(found[name], wanted, rtol=2**-5, atol=2**-6 * wanted.abs().max().item())


@pytest.mark.gpu
def test_on_cuda_inductor_holds_no_quantized_weight():
    torch._dynamo.reset()
    model = qq.convert(fill(nn.Sequential(nn.Linear(4096, 4096, bias=False))).cuda().bfloat16(), "w4a16")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = compiled(x)
    assert torch.cuda.memory_allocated() - before < 2 * out.nbytes + 2**16  # the weight would be 32 MiB
    out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "qwen3_moe grouped_mm"])
def test_on_cuda_a_graph_of_forward_and_backward_sees_new_weights_and_inputs(kind: str):
    """What a graph captured is recomputed at each replay: scales, codes and gradients are those of the weights now."""
    model, _, inputs = case(kind)
    model = model.cuda()
    inputs = [x.detach().cuda().requires_grad_() for x in inputs]
    index = experts_and_inputs("qwen3_moe", "eager")[1][2].cuda()
    arguments = inputs if kind == "linear" else [inputs[0], index, inputs[1]]
    leaves = [*model.parameters(), *inputs]

    def step() -> Tensor:
        out = model(*arguments)
        out.float().square().sum().backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # Triton compiles, cuBLAS allocates
            step()
    torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-1.7)
    graph.replay()
    found = [out.clone(), *(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)]
    for leaf in leaves:
        leaf.grad = None
    wanted = [step().detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert len(found) == len(wanted) > 2
    for got, expected in zip(found, wanted, strict=True):
        assert_same_bits(got, expected)


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and what is the same numbers in another shape, order or dtype."""
    yield node
    for user in node.users:
        if any(
            part in str(user.target)
            for part in ("view", "transpose", "permute", "aten.t.", "clone", "_to_copy", "select")
        ):
            yield from views_of(user)


# -------------------------------------------------------------------------------------- checkpointing, stop and resume


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
@DISPATCHES
def test_activation_checkpointing_changes_no_bit(implementation: str, arch: str, reentrant: bool):
    model = qq.convert(tiny_model(arch, experts_implementation=implementation), "w4a16").train()
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    calls: list[int] = []
    experts.register_forward_pre_hook(lambda *_: calls.append(1))
    with deterministic(implementation == "batched_mm"):
        expected = gradients(model)
        assert len(calls) == 1
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_equal_tensors(gradients(model), expected)
    assert len(calls) == 3  # once before, then forward and recompute


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_resume_and_continue_equals_going_on(dtype: torch.dtype, implementation: str, mode: str):
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny_model("qwen3_moe", dtype=dtype, experts_implementation=implementation)
        qq.convert(model.train(), mode, scope="experts")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    model, optimizer = start()
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(2, 4))

    resumed, optimizer = start()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    train(resumed, optimizer, range(2, 4))
    for name, parameter in model.named_parameters():
        assert_same_bits(resumed.get_parameter(name).detach(), parameter.detach(), name)


def test_training_lowers_the_loss_of_the_quantized_model():
    model = qq.convert(tiny_model("qwen3_moe", dtype=torch.float32, experts_implementation="grouped_mm"), "w4a16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert tiny_inputs(model)
