"""What an adversary found: each was wrong numbers without a word, or a model lost."""

import json
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits import assert_same_bits
from safetensors.torch import load_file, save_file
from small_modules import fill
from tiny_models import tiny_model
from torch import nn

import quads_qat as qq
from quads_qat import checkpoint_io
from quads_qat.compare import diff, inspect_checkpoint
from quads_qat.config import ActivationFormat, ActivationScale, Dialect
from quads_qat.record import RECORD
from quads_qat.resume import JOURNAL
from quads_qat.safetensors_file import FileWriter, read_header
from quads_qat.verify import verify_checkpoint


@pytest.mark.parametrize(
    ("dialect", "name"), [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
@pytest.mark.parametrize("bit", [0, 13, 22])
def test_verify_sees_every_bit_of_a_per_tensor_scale(dialect: str, name: str, bit: int, tmp_path: Path):
    """bf16 values hide a scale that is off in the last bits; engines multiply by all of them."""
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for tensor in (n for n in list(tensors) if n.endswith(f"q_proj.{name}")):
        tensors[tensor].view(torch.int32).bitwise_xor_(1 << bit)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(qq.VerificationError, match="q_proj"):
        qq.verify(model, tmp_path / "out")


def test_a_rollout_under_autocast_keeps_its_bits():
    model = qq.convert(nn.Sequential(nn.Linear(512, 64)), "w4a4_residual")
    x = torch.randn(8, 512)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_a_failed_move_loses_nothing():
    model = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a4_residual")
    x = torch.randn(2, 32)
    expected = model(x)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model._apply(fail)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0])
def test_a_static_amax_must_be_a_number(amax: float):
    q = qq.ops.quantize(torch.randn(16, 32))
    static = ActivationFormat(scale=ActivationScale.STATIC)
    with pytest.raises(ValueError, match="finite and >= 0"):
        qq.ops.linear_w4a4(torch.randn(2, 32), q, activation=static, input_amax=torch.tensor(amax))


def test_one_module_under_two_names_is_refused_at_export():
    shared = nn.Linear(32, 32)
    model = qq.convert(nn.ModuleDict({"a": shared, "b": shared}), "w4a16")
    with pytest.raises(ValueError, match="a and b are one module"):
        qq.export_weights(model, "modelopt")


def test_weights_that_change_during_an_export_are_noticed():
    model = qq.convert(tiny_model("llama"), "w4a16")
    stream = qq.export_weights(model, "modelopt")
    next(stream)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    with pytest.raises(RuntimeError, match="was changed while its model was being exported; export again"):
        list(stream)


def test_default_dtype_does_not_reach_scales(tmp_path: Path):
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16", recipe="modelopt")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    expected = qq.load_rollout(tmp_path / "out").state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = qq.load_rollout(tmp_path / "out").state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    scales = [name for name in expected if name.endswith("per_tensor_scale")]
    assert scales
    assert all(torch.equal(loaded[name], expected[name]) and loaded[name].dtype == torch.float32 for name in scales)


def test_nested_observation_goes_on_after_the_inner_one_ends():
    model = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a16")
    with qq.observe_activations(model):
        with qq.observe_activations(model):
            model(torch.ones(1, 32))
        model(torch.full((1, 32), 3.0))
    assert [v.item() for v in qq.quant_state_dict(model).values()] == [3.0]


def test_projections_that_fused_mamba_kernels_read_past_the_module_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("nemotron_h")
    projections = sorted(
        {n.rpartition(".")[2] for n, _ in model.named_modules() if n.endswith((".in_proj", ".out_proj"))}
    )
    assert "out_proj" in projections
    monkeypatch.setattr(sys.modules["quads_qat.bypasses"], "find_spec", lambda name: name == "mamba_ssm")
    with pytest.raises(ValueError, match=r"reads the master weight past the module; pass exclude="):
        qq.convert(model, "w4a16")
    qq.convert(model, "w4a16", exclude=[f"*.{name}" for name in projections])


@pytest.mark.parametrize("mode", ["w4a16", "w4a4_residual"])
def test_linears_that_the_fast_path_of_an_encoder_layer_reads_are_refused(mode: str):
    """In eval mode without gradients it multiplied by the master weights, or skipped what activations go through."""

    def model(**options: Any) -> nn.Module:
        return fill(nn.Sequential(nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, **options))).eval()

    with pytest.raises(ValueError, match=r"convert: 0\.linear1 .*set_fastpath_enabled\(False\) first.*'\*\.linear1'"):
        qq.convert(model(batch_first=True), mode)
    qq.convert(model(batch_first=False), mode)  # has none
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        converted, x = qq.convert(model(batch_first=True), mode), torch.randn(2, 3, 32)
        with torch.no_grad():
            fast = converted(x)
        assert_same_bits(fast, converted.train()(x).detach())
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_linears_that_are_read_in_pieces_are_refused():
    config = transformers.BloomConfig(
        hidden_size=64, n_layer=1, n_head=4, vocab_size=64, slow_but_exact=True, pretraining_tp=2
    )
    with pytest.raises(
        ValueError, match=r"self_attention\.dense belongs to .*build the model with slow_but_exact=False"
    ):
        qq.convert(transformers.BloomForCausalLM(config), "w4a16")
    config.slow_but_exact = False
    qq.convert(transformers.BloomForCausalLM(config), "w4a16")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint ``source``, and ``modelopt`` and ``compressed-tensors`` with activation scales made of it."""
    path = tmp_path_factory.mktemp("files")
    model = tiny_model("qwen3_moe")
    model.save_pretrained(path / "source")
    qq.convert(model, "w4a16")
    with qq.observe_activations(model):
        model(torch.arange(20)[None])
    for dialect in Dialect:
        qq.export_checkpoint(model, path / dialect, dialect=dialect, source=path / "source", activations="observed")
    return path


def changed(checkpoint: Path, to: Path, name: str, tensor: torch.Tensor) -> Path:
    """A copy of a checkpoint with another tensor ``name``."""
    shutil.copytree(checkpoint, to)
    tensors = load_file(to / "model.safetensors")
    assert name in tensors
    save_file({**tensors, name: tensor}, to / "model.safetensors", metadata={"format": "pt"})
    return to


SCALARS = {
    "two": torch.ones(2),
    "none": torch.ones(0),
    "fp64": torch.ones((), dtype=torch.float64),
    "int": torch.ones((), dtype=torch.int32),
    "bool": torch.ones((), dtype=torch.bool),
    "complex": torch.ones((), dtype=torch.complex64),
}


@pytest.mark.parametrize("how", SCALARS)
@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("modelopt", "weight_scale_2"),
        ("modelopt", "input_scale"),
        ("compressed-tensors", "weight_global_scale"),
        ("compressed-tensors", "input_global_scale"),
    ],
)
def test_a_scale_that_is_not_one_float_is_named(dialect: str, name: str, how: str, files: Path, tmp_path: Path):
    """Two elements were a traceback, complex and boolean ones were taken for numbers."""
    name = f"model.layers.0.self_attn.o_proj.{name}"
    path = changed(files / dialect, tmp_path / "changed", name, SCALARS[how])
    rule = f"{name} must be one float32 number"
    other = next(d for d in Dialect if d != dialect)
    with pytest.raises(ValueError, match=rule):
        qq.load_rollout(path, activation_scale="static")
    with pytest.raises(ValueError, match=rule):
        qq.convert_dialect(path, tmp_path / "out", dialect=other)
    assert any(rule in problem for problem in inspect_checkpoint(path)["problems"])
    assert rule in str(verify_checkpoint(files / "source", path))
    assert any(rule in row.get("difference", "") for row in diff(files / dialect, path))
    if "input" in name:
        with pytest.raises(ValueError, match=rule):
            qq.quantize_checkpoint(files / "source", tmp_path / "out", activations=path)


@pytest.mark.parametrize(("dialect", "value"), [("modelopt", 3e38), ("compressed-tensors", 1e-42)])
def test_a_synced_activation_scale_whose_amax_is_infinite_is_refused(dialect: str, value: float):
    """It was taken over, and the next forward failed."""
    trainer, rollout = tiny_model("llama"), tiny_model("llama")
    qq.convert(trainer, "w4a16")
    qq.convert(rollout, "w4a4_residual", activation_scale="static")
    ids = torch.arange(20)[None]
    qq.calibrate(rollout, [ids])
    with qq.observe_activations(trainer):
        trainer(ids)
    stream = qq.export_weights(trainer, dialect, activations="observed")
    spoiled = ((n, torch.full_like(t, value) if "input_" in n and "scale" in n else t) for n, t in stream)
    with pytest.raises(ValueError, match="no activation can need such a scale"):
        qq.update_weights(rollout, spoiled)


def test_code_in_folders_travels_from_a_cache(files: Path, tmp_path: Path):
    """The Hub's cache is below ``~/.cache``, which is no hidden folder of the model."""
    source = tmp_path / ".cache" / "model"
    shutil.copytree(files / "source", source)
    for file in ("modeling.py", "layers/attention.py", ".git/hook.py", "layers/.old/attention.py"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text("")
    qq.quantize_checkpoint(source, tmp_path / "out")
    found = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.py")}
    assert found == {"modeling.py", "layers/attention.py"}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deep(file: str, files: Path, tmp_path: Path):
    shutil.copytree(files / "source", tmp_path / "source")
    (tmp_path / "source" / file).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=f"{file}: cannot be read as JSON"):
        qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("shape", [[1 << 32, 1 << 32], [0, 1 << 64], [1 << 64]])
def test_a_shape_whose_size_overflows_is_no_empty_tensor(shape: list[int], tmp_path: Path):
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is damaged"):
        read_header(tmp_path / "model.safetensors")


def test_a_weight_of_another_rank_is_named(files: Path, tmp_path: Path):
    name = "model.layers.0.self_attn.q_proj.weight"
    source = changed(files / "source", tmp_path / "source", name, torch.ones(64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"{name} has shape \[64\], which does not go with config.json"):
        qq.quantize_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("command", [qq.dequantize_checkpoint, partial(qq.convert_dialect, dialect="modelopt")])
@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_as_destination_is_refused_before_the_work(command: Any, target: str, files: Path, tmp_path: Path):
    """It was refused by the system, when everything had been written."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    progress: list[int] = []
    with pytest.raises(ValueError, match="link is a symbolic link"):
        command(files / "compressed-tensors", tmp_path / "link", progress=lambda done, total: progress.append(done))
    assert not progress


@pytest.mark.parametrize("ignore", [5, {"a": 1}, "lm_head", [["lm_head"]], [1]])
@pytest.mark.parametrize("dialect", list(Dialect), ids=str)
def test_ignored_modules_that_are_no_list_of_names(ignore: Any, dialect: Dialect, files: Path, tmp_path: Path):
    path = tmp_path / "out"
    shutil.copytree(files / dialect, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ignore
    (path / "config.json").write_text(json.dumps(config))
    for reads in (inspect_checkpoint, qq.load_model, partial(verify_checkpoint, files / "source")):
        with pytest.raises(ValueError, match="ignore must be a list of names"):
            reads(path)


@pytest.mark.parametrize("excluded", [5, {"a": 1}, "lm_head", [["lm_head"]], [1]])
def test_excluded_modules_that_are_no_list_of_names(excluded: Any, files: Path, tmp_path: Path):
    path = tmp_path / "out"
    shutil.copytree(files / "modelopt", path)
    config = json.loads((path / "hf_quant_config.json").read_text())
    config["quantization"]["exclude_modules"] = excluded
    (path / "hf_quant_config.json").write_text(json.dumps(config))
    assert any("exclude_modules" in problem for problem in inspect_checkpoint(path)["problems"])
    assert "exclude_modules" in str(verify_checkpoint(files / "source", path))


@pytest.mark.parametrize("recipe", ["aligned", "modelopt-ieee"])
def test_verify_sees_every_bit_of_codes_and_scales_of_zeros(recipe: str, tmp_path: Path):
    """Where a block is all zeros, its scale is free; where the scale is zero, its codes are. Engines do not care."""
    model = tiny_model("llama")
    weight = "model.layers.0.self_attn.o_proj.weight"
    with torch.no_grad():
        parameter = model.get_parameter(weight)
        parameter[0] = 0
        parameter[1, :16] = 1e-7
    model.save_pretrained(tmp_path / "source")
    qq.convert(model, "w4a16", recipe=recipe)
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for name, count in ((weight, 16), (f"{weight}_scale", 5)):
        stored = tensors[name].view(torch.uint8)
        for i in range(count):
            stored.view(-1)[i] ^= 1 << i % 7
            save_file(tensors, file, metadata={"format": "pt"})
            with pytest.raises(qq.VerificationError, match=r"o_proj\.weight"):
                qq.verify(model, tmp_path / "out")
            assert not verify_checkpoint(tmp_path / "source", tmp_path / "out").ok
            stored.view(-1)[i] ^= 1 << i % 7
    save_file(tensors, file, metadata={"format": "pt"})
    assert qq.verify(model, tmp_path / "out").ok


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t.reshape(1), lambda t: t.bfloat16()])
def test_verify_sees_a_scale_of_another_dtype_or_shape(change: Any, files: Path, tmp_path: Path):
    name = "model.layers.0.self_attn.o_proj.weight_scale_2"
    scale = load_file(files / "modelopt" / "model.safetensors")[name]
    path = changed(files / "modelopt", tmp_path / "changed", name, change(scale))
    assert name in str(verify_checkpoint(files / "source", path))


@pytest.mark.parametrize(
    "line",
    [
        '{"shard": "model.safetensors"}',
        '{"shard": 5, "size": 1, "sha256": "0"}',
        '{"shard": "model.safetensors", "size": "1", "sha256": "0"}',
        '{"note": "amaxes"}',
        "[" * 100_000,
    ],
)
def test_a_journal_whose_lines_say_nothing(line: str, files: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    journal = tmp_path / "out" / JOURNAL
    journal.write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match="its journal cannot be read"):
        qq.quantize_checkpoint(files / "source", tmp_path / "out")
    assert journal.read_text() == f"{{}}\n{line}\n"


def test_a_disk_that_is_full_at_once_leaves_nothing(monkeypatch: pytest.MonkeyPatch, files: Path, tmp_path: Path):
    """The directory and an empty journal stayed, though the message said that nothing did."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        for name in ("out", "mine"):
            with pytest.raises(ValueError, match=r"No space left on device.*nothing was left behind"):
                qq.quantize_checkpoint(files / "source", tmp_path / name)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "mine").iterdir())


def test_a_directory_that_was_finished_meanwhile_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, files: Path, tmp_path: Path
):
    """Between the look at a directory and the lock another process may finish; a new journal stayed behind."""
    qq.quantize_checkpoint(files / "source", tmp_path / "out")
    before = sorted((tmp_path / "out").iterdir())
    monkeypatch.setattr("quads_qat.resume._require_usable", lambda path: False)
    monkeypatch.setattr("quads_qat.output_shards.is_complete", lambda path, job: False)
    with pytest.raises(ValueError, match="exists already and holds"):
        qq.quantize_checkpoint(files / "source", tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("load", [qq.load_model, qq.load_rollout])
def test_what_is_in_high_precision_is_no_integer(load: Any, name: str, dtype: torch.dtype, files: Path, tmp_path: Path):
    """Codes without their scales, cast as if they were numbers."""
    weight = load_file(files / "modelopt" / "model.safetensors")[name]
    path = changed(files / "modelopt", tmp_path / "changed", name, torch.ones(weight.shape).to(dtype))
    with pytest.raises(ValueError, match=rf"{name} must be torch.bfloat16 or another float of at least 16 bits, got"):
        load(path)


@pytest.mark.parametrize("shape", [(), (1,), (32, 1)])
def test_a_bias_of_another_shape_is_not_broadcast(shape: tuple[int, ...], tmp_path: Path):
    model = qq.convert(tiny_model("gpt_oss"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "out", dialect="compressed-tensors")
    names = load_file(tmp_path / "out" / "model.safetensors")
    name = next(n for n in names if n.endswith(".experts.0.up_proj.bias"))
    path = changed(tmp_path / "out", tmp_path / "changed", name, torch.ones(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"{name} must have shape \[\d+\], got"):
        qq.load_model(path)


@pytest.mark.parametrize("code", [5, ["evil.Model"], {"a": "evil.Model"}])
def test_model_code_whose_name_is_none(code: Any, files: Path, tmp_path: Path):
    shutil.copytree(files / "source", tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config |= {"architectures": ["Nowhere"], "auto_map": {"AutoModelForCausalLM": code}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must name its model code as file\.Class"):
        qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out", trust_remote_code=True)


@pytest.mark.parametrize("made_by", ["export", "quantize", "convert-dialect"])
def test_any_byte_of_any_shard_that_has_changed_is_seen(made_by: str, files: Path, tmp_path: Path):
    """The activation scale of a weight whose input nothing else takes cannot be computed anew from weights."""
    path = files / "modelopt"
    options: dict[str, Any] = {"shard_bytes": 100_000}
    if made_by == "quantize":
        path = tmp_path / "quantized"
        qq.quantize_checkpoint(files / "source", path, activations=files / "modelopt", **options)
    elif made_by == "convert-dialect":
        path = tmp_path / "converted"
        qq.convert_dialect(files / "modelopt", path, dialect="compressed-tensors", **options)
    assert verify_checkpoint(files / "source", path).ok
    assert inspect_checkpoint(path)["problems"] == []
    scale = "model.layers.0.self_attn.o_proj.input_" + ("global_scale" if made_by == "convert-dialect" else "scale")
    shard = next(file for file in path.glob("*.safetensors") if scale in read_header(file))
    data, trainer = shard.read_bytes(), qq.convert(tiny_model("qwen3_moe"), "w4a16")
    assert qq.verify(trainer, path).ok
    at = read_header(shard)[scale].begin
    for place in (at, at + 1, at + 2, len(data) // 2, len(data) - 1):
        shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert not verify_checkpoint(files / "source", path).ok
        problems = " ".join(inspect_checkpoint(path)["problems"])
        assert f"{shard.name}: its bytes are not those that were written" in problems
        with pytest.raises(qq.VerificationError, match=shard.name if place < at + 3 else "differs, first"):
            qq.verify(trainer, path)
    shard.write_bytes(data)
    assert qq.verify(trainer, path).ok


def test_hashes_are_not_carried_into_what_is_made_of_a_checkpoint(files: Path, tmp_path: Path):
    qq.dequantize_checkpoint(files / "modelopt", tmp_path / "plain")
    qq.quantize_checkpoint(tmp_path / "plain", tmp_path / "again")
    made_by = [json.loads((tmp_path / name / RECORD).read_text())["made_by"] for name in ("plain", "again")]
    assert [job["command"] for job in made_by] == ["dequantize", "quantize"]


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_generation_config_that_cannot_be_read(text: str, files: Path, tmp_path: Path):
    shutil.copytree(files / "modelopt", tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").write_bytes(text.encode("latin-1"))
    for load in (qq.load_model, qq.load_rollout):
        with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
            load(tmp_path / "out")


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path):
    """At once, though the destination is there by now; that of a process that is still writing stays."""
    model = qq.convert(tiny_model("llama"), "w4a16")

    def export() -> None:
        qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", shard_bytes=20_000)

    def killed_at(file: int) -> None:
        if os.fork() == 0:
            torch.set_num_threads(1)
            finish = FileWriter.finish
            left = [file]

            def finish_or_die(self: FileWriter) -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                finish(self)

            FileWriter.finish = finish_or_die
            export()
            os._exit(0)
        os.wait()

    killed_at(2)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    assert len(list(left.iterdir())) == 2
    (tmp_path / ".other.abc.partial").mkdir()
    with checkpoint_io.whole_directory(tmp_path / "out") as written:
        assert not left.exists()
        (written / "mine").write_text("")
        export()
        assert (written / "mine").exists()
        shutil.rmtree(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".other.abc.partial"}
    (tmp_path / ".out.killed.partial").mkdir()  # while another process made the destination
    with pytest.raises(ValueError, match="exists already"):
        export()
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".other.abc.partial"}


def test_a_directory_that_is_taken_for_abandoned_before_it_is_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Another call may find it in that moment; the writer then makes another one."""
    make, made = tempfile.mkdtemp, []

    def made_and_removed(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            checkpoint_io.remove_abandoned(tmp_path / "out")
            assert not os.path.exists(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_removed)
    with checkpoint_io.whole_directory(tmp_path / "out") as directory:
        checkpoint_io.remove_abandoned(tmp_path / "out")
        (directory / "x").write_text("")
    assert len(made) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


def test_an_export_where_the_file_system_has_no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(checkpoint_io, "lock", refuse)
    (tmp_path / ".out.abc.partial").mkdir()
    model = qq.convert(tiny_model("llama"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.abc.partial"}  # whose process may be alive


def test_two_exports_into_one_directory(tmp_path: Path):
    model = qq.convert(tiny_model("llama"), "w4a16")

    def two() -> None:
        with checkpoint_io.whole_directory(tmp_path / "out") as second:
            (second / "x").write_text("")
            qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")

    with pytest.raises(ValueError, match=r"out: could not be written .*not empty.*; nothing was left behind"):
        two()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert qq.verify(model, tmp_path / "out").ok


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", "x"), ("tie_word_embeddings", 5), ("num_hidden_layers", [1])]
)
def test_verify_of_a_config_that_transformers_refuses(key: str, value: Any, files: Path, tmp_path: Path):
    """It was a traceback from the depth of transformers."""
    shutil.copytree(files / "modelopt", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {key: value}))
    report = verify_checkpoint(files / "source", tmp_path / "out")
    assert any(name.startswith("config.json") for name in report.differences)
