"""Contract under test: with the plugin, layers of the real vLLM compute the bits of our rollout modules, on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from by_hand import tensors
from engines import table
from engines.measure import trainer
from torch import Tensor, nn

import quads_qat as qq
from engines_real import vllm_cpu
from engines_real.architectures import BUILT, EXTRA
from engines_real.vllm_cpu import Served, decoded, packed_modules, trained
from quads_qat import ops
from quads_qat.integrations import vllm as plugin
from quads_qat.integrations import vllm_policy
from quads_qat.integrations.vllm_kernels import gate_on_cpu
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

DIALECTS = ["modelopt", "compressed-tensors"]
RESIDUAL = qq.ResidualConfig(fraction=0.25, scope="token")
SCHEMES = {"W4A16": "none", "W4A4": "observed"}
LOADED = [arch for arch in BUILT if table.read()[arch].cells["modelopt", "W4A4"]["vLLM"] == "pass"]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> None:
    vllm_cpu.prepare(tmp_path_factory.mktemp("group") / "first")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUADS_QAT_VLLM", "1")
    plugin.register()
    yield
    plugin.unregister()


def exported(arch: str, path: Path, dialect: str, scheme: str = "W4A4", **how: Any) -> Path:
    qq.export_checkpoint(trained(arch)[0], path, dialect=dialect, activations=SCHEMES[scheme], **how)
    return path


def rows(k: int, count: int = 5, seed: int = 0) -> Tensor:
    """Activations with outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k, generator=generator)
    return (x * torch.exp(2 * torch.randn(count, k, generator=generator))).bfloat16()


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def of_rollout(rollout: nn.Module, name: str) -> list[nn.Module]:
    """The modules of ours that vLLM's module ``name`` computes, in order."""
    parent, _, leaf = name.rpartition(".")
    found = [rollout.get_submodule(f"{parent}.{shard}") for shard in FUSED.get(leaf, (leaf,))]
    assert all(isinstance(module, ResidualCompensatedLinear) for module in found)
    return found


# ------------------------------------------------------------------------------------------------------------ the bits


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arch", ["llama", "qwen2_moe", "deepseek_v2"])
def test_linears_have_the_bits_of_our_rollout(arch: str, dialect: str, scheme: str, tmp_path: Path) -> None:
    path = exported(arch, tmp_path / "out", dialect, scheme, residual=RESIDUAL)
    served, rollout = Served(path).load().finish(), qq.load_rollout(path)
    seen = 0
    for name in packed_modules(served.model):
        module = served.model.get_submodule(name)
        if name.endswith("experts"):
            continue
        for x in (
            rows(module.input_size),
            rows(module.input_size, 1, seed=1),
            torch.zeros(2, module.input_size).bfloat16(),
        ):
            assert_same_bits(module(x)[0], torch.cat([ours(x) for ours in of_rollout(rollout, name)], -1), name)
        seen += 1
    assert seen >= 4


def kernel_of(module: nn.Module) -> Any:
    method: Any = module.quant_method
    return method.kernel if hasattr(method, "kernel") else module.scheme.kernel  # pyright: ignore


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "deepseek_v2"])
def test_experts_have_the_bits_of_our_rollout(
    arch: str, dialect: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its grouped form, which is the one that a GPU runs: experts' outputs are added in that order."""
    monkeypatch.setattr(ResidualCompensatedExperts, "grouped_on", staticmethod(lambda x: True))
    path = exported(arch, tmp_path / "out", dialect, scheme, residual=RESIDUAL)
    served, rollout = Served(path).load().finish(), qq.load_rollout(path)
    theirs = [m for n, m in served.model.named_modules() if "w13_weight" in packed_modules(served.model).get(n, ())]
    ours = [module for module in rollout.modules() if isinstance(module, ResidualCompensatedExperts)]
    assert len(theirs) == len(ours) > 0
    for engine, module in zip(theirs, ours, strict=True):
        x, weights, chosen = rows(64, 7), torch.rand(7, 2), torch.stack([torch.randperm(4)[:2] for _ in range(7)])
        out = engine.quant_method.apply(engine, x, weights, chosen.int(), None, None)
        assert_same_bits(out, module(x, chosen, weights), "experts")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_latent_attention_gets_the_weights_themselves(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """vLLM multiplies an identity matrix by ``kv_b_proj``, whose ones are no ones any more when they are quantized."""
    from vllm.model_executor.layers.attention import mla_attention

    request.getfixturevalue("on")
    path = exported("deepseek_v2", tmp_path / "out", dialect, residual=qq.ResidualConfig(fraction=0.0))
    layer: Any = Served(path).load().finish().model.get_submodule("model.layers.0.self_attn.kv_b_proj")
    weight = decoded(layer, "weight")
    assert_same_bits(mla_attention.get_and_maybe_dequant_weights(layer, torch.bfloat16), weight, "kv_b_proj")
    identity = torch.eye(layer.input_size, dtype=torch.bfloat16)
    assert not torch.equal(kernel_of(layer).apply_weights(layer, identity).T, weight)


@pytest.mark.usefixtures("on")
def test_experts_of_other_ranks_count_for_nothing(tmp_path: Path) -> None:
    path = exported("qwen3_moe", tmp_path / "out", "modelopt", residual=RESIDUAL)
    served = Served(path).load().finish()
    engine: Any = next(m for n, m in served.model.named_modules() if n.endswith("routed_experts"))
    x, weights, chosen = rows(64, 7), torch.rand(7, 2), torch.stack([torch.randperm(4)[:2] for _ in range(7)]).int()
    kernel = engine.quant_method.moe_kernel

    def run(weights: Tensor, expert_map: Tensor | None) -> Tensor:
        stack = engine.w13_weight, engine.w2_weight
        return kernel.apply(x, *stack, weights, chosen, engine.activation, 4, expert_map, False)

    only_first = torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    assert_same_bits(run(weights, only_first), run(weights * (chosen < 2), None), "masked")


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "arch", [arch for arch in BUILT if table.read()[arch].cells["modelopt", "W4A4"]["vLLM"] == "pass"]
)
def test_every_packed_layer_of_every_architecture_is_computed_by_the_formula(arch: str, tmp_path: Path) -> None:
    """Written out with the weights as vLLM's emulation decodes them."""
    path = exported(arch, tmp_path / "out", "modelopt", residual=RESIDUAL)
    served = Served(path, extra=EXTRA.get(arch)).load().finish()
    for name, weights in packed_modules(served.model).items():
        module: Any = served.model.get_submodule(name)
        matrices = [decoded(module, weight) for weight in weights]
        x = rows(matrices[0].shape[-1])
        if weights == ("weight",):
            assert_same_bits(module.quant_method.apply(module, x), product(x, matrices[0]), name)
            continue
        for expert in range(matrices[0].shape[0]):
            chosen, one = torch.full((5, 1), expert, dtype=torch.int32), torch.ones(5, 1)
            out = module.quant_method.apply(module, x, one, chosen, None, None)
            config = module.quant_method.moe_kernel.fused_experts.activation_config
            gated = gate_on_cpu(module.activation, product(x, matrices[0][expert]), config)
            assert_same_bits(out, product(gated, matrices[1][expert]), f"{name}: {expert}")


def product(x: Tensor, weight: Tensor) -> Tensor:
    terms, _ = ops.quantize_activation(x, residual=RESIDUAL)
    first, second = (term.float() @ weight.float().t() for term in terms)
    return (first + second).to(x.dtype)


# -------------------------------------------------------------------------------------------------------------- reload


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_new_weights_arrive_in_place_any_number_of_times(arch: str, dialect: str, scheme: str, tmp_path: Path) -> None:
    first, other = (tmp_path / name for name in ("first", "other"))
    model = trained(arch)[0]
    exported(arch, first, dialect, scheme, residual=RESIDUAL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    try:
        exported(arch, other, dialect, scheme, residual=RESIDUAL)
    finally:
        trainer.cache_clear()
    served = Served(first).load().finish()
    before = outputs(served)
    addresses = {name: tensor.data_ptr() for name, tensor in state(served.model).items()}
    expected = outputs(Served(other).load().finish())
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    for source, wanted in [(other, expected), (first, before), (other, expected)]:
        served.reload(tensors(source).items())
        after = outputs(served)
        for name, out in after.items():
            assert_same_bits(out, wanted[name], name)
        assert addresses == {name: tensor.data_ptr() for name, tensor in state(served.model).items()}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_an_engine_that_starts_with_dummy_weights_waits_for_real_ones(arch: str, tmp_path: Path) -> None:
    """As RL frameworks start it: ``--load-format dummy``, then an update."""
    path = exported(arch, tmp_path / "out", "modelopt", residual=RESIDUAL)
    expected = outputs(Served(path).load().finish())
    served = Served(path, load_format="dummy").fill_with_dummies().finish()
    lost = next(name for name in tensors(path) if name.endswith("down_proj.weight_scale_2"))
    with pytest.raises(ValueError, match="must hold powers of two"):
        served.reload((name, torch.full_like(t, 3.0) if name == lost else t) for name, t in tensors(path).items())
    served = Served(path, load_format="dummy").fill_with_dummies().finish()
    served.reload(tensors(path).items())
    for name, out in outputs(served).items():
        assert_same_bits(out, expected[name], name)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_linears_compile_into_one_graph_of_our_operators(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; the graph is looked at, not run. (The reference on a CPU looks at values, and does not compile.)"""
    served = Served(exported("llama", tmp_path / "out", dialect, residual=RESIDUAL)).load().finish()
    module: Any = served.model.get_submodule("model.layers.0.mlp.down_proj")
    called: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        names = (str(node.target).removesuffix(".default") for node in graph.graph.nodes)
        called.extend(name for name in names if "quads_qat" in name)
        return lambda *_: (torch.zeros(5, 64, dtype=torch.bfloat16),)

    monkeypatch.setattr(ops, "_resolve", lambda backend, x: "triton")
    compiled = torch.compile(lambda x: kernel_of(module).apply_weights(module, x), fullgraph=True, backend=look)
    with torch.no_grad():
        assert compiled(rows(48)).shape == (5, 64)
    assert called == ["quads_qat.quantize_activation", "quads_qat.matmul"]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {n: getattr(model.get_submodule(m), n) for m, ws in packed_modules(model).items() for n in ws} | dict(
        model.named_parameters()
    )


def outputs(served: Served) -> dict[str, Tensor]:
    """Of every packed module, for inputs that do not change."""
    found = {}
    for name, weights in packed_modules(served.model).items():
        module: Any = served.model.get_submodule(name)
        if weights == ("weight",):
            found[name] = module(rows(module.input_size))[0]
        else:
            chosen = torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32)
            found[name] = module.quant_method.apply(module, rows(64, 3), torch.full((3, 2), 0.5), chosen, None, None)
    return found


# ------------------------------------------------------------------------------------------------------ what it is told


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_the_variable_vllm_is_left_alone(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUADS_QAT_VLLM", raising=False)
    plugin.register()
    path = exported("llama", tmp_path / "out", dialect, residual=RESIDUAL)
    served = Served(path).load().finish()
    kinds = {type(kernel_of(served.model.get_submodule(name))).__name__ for name in packed_modules(served.model)}
    assert kinds == {"EmulationNvFp4LinearKernel"}


def test_a_second_call_changes_nothing_and_all_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    def functions() -> list[Any]:
        return [getattr(import_module(module), name) for module, name, _ in plugin.PATCHES]

    before = functions()
    monkeypatch.setenv("QUADS_QAT_VLLM", "1")
    plugin.register()
    inside = functions()
    plugin.register()
    assert functions() == inside
    assert not set(inside) & set(before)
    plugin.unregister()
    plugin.unregister()
    assert functions() == before


def test_vllm_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    conftest = str(Path(__file__).with_name("conftest.py"))
    code = (
        f"import os, runpy; runpy.run_path({conftest!r}); os.environ.pop('VLLM_PLUGINS')\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.layers.quantization import modelopt\n"
        "print(modelopt.init_nvfp4_linear_kernel.__module__)"
    )
    environ = os.environ | {"QUADS_QAT_VLLM": "1"}
    command = [sys.executable, "-c", code]  # elsewhere: metadata of an older build may lie in the current directory
    ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "quads_qat.integrations.vllm_kernels", ran.stderr


@pytest.mark.usefixtures("on")
def test_the_log_says_what_is_computed_and_batch_invariance_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quads_qat.integrations import vllm_kernels

    said: set[str] = set()
    monkeypatch.setattr(vllm_kernels.logger, "info_once", lambda message, *parts: said.add(message % parts))
    Served(exported("mixtral", tmp_path / "out", "modelopt", residual=RESIDUAL))
    assert said == {
        "quads_qat: NVFP4 linears and experts are computed as rollouts: activations per_token, recipe aligned; "
        "residual fraction=0.25, scope=token, norm=l2, granularity=1 (of config.json); weights aligned"
    }
    said.clear()
    Served(exported("llama", tmp_path / "plain", "compressed-tensors", "W4A16"))
    assert len(said) == 1
    assert "left to vLLM's kernels; QUADS_QAT_RESIDUAL overrides this" in said.pop()
    monkeypatch.setattr(vllm_kernels.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT asks for sums"):
        Served(tmp_path / "out")


def policy_of(path: Path) -> vllm_policy.Serving:
    served = Served(path)
    return kernel_of(next(m for n, m in served.model.named_modules() if n.endswith("o_proj"))).chosen


@pytest.mark.usefixtures("on")
def test_the_environment_overrides_what_the_file_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported("llama", tmp_path / "out", "modelopt", residual=RESIDUAL)
    assert policy_of(path).residual == RESIDUAL
    monkeypatch.setenv(vllm_policy.RESIDUAL, json.dumps({"fraction": 0.125, "scope": "block"}))
    monkeypatch.setenv(vllm_policy.SCALE, "static")
    monkeypatch.setenv(vllm_policy.RECIPE, "transformer-engine")
    chosen = policy_of(path)
    assert chosen.residual == qq.ResidualConfig(fraction=0.125, scope="block")
    assert (chosen.activation.scale, chosen.activation.recipe) == ("static", "transformer-engine")


@pytest.mark.usefixtures("on")
def test_static_scales_are_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_policy.SCALE, "static")
    for dialect in DIALECTS:
        path = exported("llama", tmp_path / dialect, dialect, residual=RESIDUAL)
        served, rollout = Served(path).load().finish(), qq.load_rollout(path, activation_scale="static")
        for name in packed_modules(served.model):
            module, x = served.model.get_submodule(name), rows(64 if "down" not in name else 48)
            expected = torch.cat([ours(x) for ours in of_rollout(rollout, name)], -1)
            assert_same_bits(module(x)[0], expected, name)


@pytest.mark.usefixtures("on")
def test_what_others_wrote_gets_the_defaults_and_w4a16_stays_with_vllm(tmp_path: Path) -> None:
    path = exported("llama", tmp_path / "out", "modelopt")
    assert policy_of(path).residual == qq.ResidualConfig()  # W4A4, and nothing recorded
    weights_only = exported("llama", tmp_path / "w4a16", "modelopt", "W4A16")
    served = Served(weights_only)
    assert type(kernel_of(next(m for n, m in served.model.named_modules() if n.endswith("o_proj")))).__name__ == (
        "EmulationNvFp4LinearKernel"
    )


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({vllm_policy.RESIDUAL: '{"scope": "batch"}'}, "scope 'batch' of the environment: the rows of other requests"),
        ({vllm_policy.RESIDUAL: '{"scope": "static"}'}, "calibrated masks are not part of checkpoints"),
        ({vllm_policy.SCALE: "per_tensor"}, "activation scale 'per_tensor' of the environment"),
        ({vllm_policy.RESIDUAL: "0.5"}, r"QUADS_QAT_RESIDUAL='0.5' is not understood .*e.g. {"),
        ({vllm_policy.SCALE: "row"}, "QUADS_QAT_ACTIVATION_SCALE='row' is not understood"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported("llama", tmp_path / "out", "modelopt", residual=RESIDUAL)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Served(path)


@pytest.mark.usefixtures("on")
def test_experts_with_static_scales_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported("mixtral", tmp_path / "out", "modelopt", residual=RESIDUAL)
    monkeypatch.setenv(vllm_policy.SCALE, "static")
    with pytest.raises(ValueError, match="only a reciprocal"):
        Served(path)


@pytest.mark.usefixtures("on")
def test_a_scale_that_was_not_loaded_is_noticed(tmp_path: Path) -> None:
    path = exported("qwen3_moe", tmp_path / "out", "modelopt", residual=RESIDUAL)
    for lost in (
        "model.layers.0.self_attn.o_proj.weight_scale_2",
        "model.layers.1.mlp.experts.2.down_proj.weight_scale_2",
    ):
        stored = {name: tensor for name, tensor in tensors(path).items() if name != lost}
        with pytest.raises(ValueError, match=r"must hold powers of two, as recipe 'aligned' makes them, got \[nan\]"):
            Served(path).load(stored.items()).finish()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.metadata, "version", lambda name: "0.34.1")
    monkeypatch.setenv("QUADS_QAT_VLLM", "1")
    with pytest.raises(RuntimeError, match=r"tested with vLLM 0.33, got 0.34.1; .*QUADS_QAT_VLLM=force"):
        plugin.register()
    monkeypatch.setenv("QUADS_QAT_VLLM", "yes please")
    with pytest.raises(ValueError, match="must be 1, 0 or force"):
        plugin.register()
