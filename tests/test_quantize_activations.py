"""Contract under test: where a W4A4 checkpoint's activation scales come from, and what is recorded for rollouts."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, tensors
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat.demo import DATA

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"
IDS = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(123))
CALIBRATED = ["modelopt/llama-nvfp4", "modelopt/qwen3-nvfp4", "modelopt/qwen3moe-nvfp4"]
CALIBRATED += ["compressed_tensors/llama-nvfp4", "compressed_tensors/qwen3-nvfp4"]


@pytest.mark.parametrize("fixture", CALIBRATED)
def test_calibration_gives_the_peers_scales(fixture: str, tmp_path: Path) -> None:
    """The whole W4A4 file is the peer's, byte for byte, when it sees the tokens that the peer saw."""
    source = CHECKPOINTS / "bf16" / fixture.split("/")[1].split("-")[0]
    peer, dialect = tensors(CHECKPOINTS / fixture), fixture.split("/")[0].replace("_", "-")
    recipe = {"modelopt": "modelopt-ieee", "compressed-tensors": "llm-compressor"}[dialect]
    options: dict[str, Any] = {"dialect": dialect, "recipe": recipe}
    qq.quantize_checkpoint(source, tmp_path / "out", calibrate=[IDS], **options)
    ours = tensors(tmp_path / "out")
    assert ours.keys() == peer.keys()
    for name, tensor in peer.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert config(tmp_path / "out")["quads_qat"]["activations"] == "observed"

    qq.quantize_checkpoint(source, tmp_path / "taken", activations=CHECKPOINTS / fixture, **options)
    assert (tmp_path / "taken" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    assert config(tmp_path / "taken")["quads_qat"]["activations"] == "given"


def test_scales_of_the_other_dialect_and_of_experts_that_differ(tmp_path: Path) -> None:
    """llm-compressor calibrates every expert for itself; engines want one scale, the largest."""
    peer = CHECKPOINTS / "compressed_tensors" / "qwen3moe-nvfp4"
    qq.quantize_checkpoint(SOURCE, tmp_path / "out", activations=peer)
    ours, theirs = tensors(tmp_path / "out"), tensors(peer)
    for layer in (0, 1):
        for projection in ("gate_proj", "down_proj"):
            names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}" for e in range(4)]
            inverse = torch.stack([theirs[f"{name}.input_global_scale"] for name in names])
            assert len(inverse.unique()) > 1 or projection == "gate_proj"
            for name in names:
                assert torch.equal(ours[f"{name}.input_scale"], 1 / inverse.min())


def test_calibration_on_text_with_the_checkpoints_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("37+45=82\n" * 200, "utf-8")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    source = shutil.copytree(DATA, tmp_path / "source")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(source)
    qq.quantize_checkpoint(source, tmp_path / "out", calibrate=text)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    stored = tensors(tmp_path / "out")
    scales = [t for n, t in stored.items() if n.endswith("input_scale")]
    assert len(scales) == 112
    assert all(bool(t > 0) for t in scales)
    assert len({t.item() for t in scales}) > 3
    assert qq.verify_checkpoint(source, tmp_path / "out").ok
    from quads_qat.activation_scales import LENGTH, ROWS, _tokens

    batches = _tokens(source, text.read_text("utf-8") * 3, False)
    assert [tuple(b.shape) for b in batches[:2]] == [(ROWS, LENGTH), (ROWS, LENGTH)]
    tokens = tokenizer.encode(text.read_text("utf-8") * 3).ids
    assert len(tokens) == 3 * 9 * 200
    assert torch.cat([b.flatten() for b in batches]).tolist() == tokens


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    from quads_qat.activation_scales import require_tokenizer

    (tmp_path / "config.json").write_text('{"vocab_size": 128}', "utf-8")
    with pytest.raises(ValueError, match=r"holds no tokenizer \(tokenizer\*.*copy the model's"):
        require_tokenizer(tmp_path)
    (tmp_path / "tekken.json").touch()
    require_tokenizer(tmp_path)


def test_of_a_model_of_bytes_the_bytes_of_a_text_are_its_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes("ä 37+45=82\n".encode() * 50)
    with pytest.warns(UserWarning, match="holds no tokenizer; the bytes of the text are taken for token ids"):
        qq.quantize_checkpoint(DATA, tmp_path / "text-calibrated", calibrate=text)
    ids = torch.tensor(list(text.read_bytes()))
    rows = [ids[None, :512], ids[None, 512:]]
    qq.quantize_checkpoint(DATA, tmp_path / "ids-calibrated", calibrate=rows)
    assert qq.diff(tmp_path / "text-calibrated", tmp_path / "ids-calibrated") == []


def test_what_rollouts_do_is_recorded(tmp_path: Path) -> None:
    residual = qq.ResidualConfig(fraction=0.25)
    peer = CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4"
    options: dict[str, Any] = {"activations": peer, "residual": residual, "activation_scale": "static"}
    qq.quantize_checkpoint(SOURCE, tmp_path / "out", **options)
    model = qq.convert(qq.load_model(tmp_path / "out"), "w4a16")
    scales = {n: t for n, t in tensors(tmp_path / "out").items() if n.endswith("input_scale")}
    qq.export_checkpoint(
        model, tmp_path / "twin", dialect="modelopt", activations=scales, residual=residual, activation_scale="static"
    )
    assert qq.contract_of(tmp_path / "out") == qq.contract_of(tmp_path / "twin")
    assert qq.contract_of(qq.load_rollout(tmp_path / "out")).rollout == qq.contract_of(tmp_path / "twin").rollout


@pytest.mark.parametrize("read", [qq.load_rollout, AutoModelForCausalLM.from_pretrained], ids=["ours", "transformers"])
def test_what_no_file_records_is_said_once(read: Any) -> None:
    peer = CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4"
    said = (
        r"does not record what rollouts do .*_scale='per_token' and compensates 50% of the channels \(scope='token'\)"
    )
    said += r"\. Pass residual= \(diagnose: --residual-fraction\), or record it: export_checkpoint\("
    with pytest.warns(UserWarning, match=said) as seen:
        read(peer)
    assert sum("does not record" in str(w.message) for w in seen) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "^.* does not record")
        qq.load_rollout(peer, residual=qq.ResidualConfig())
        qq.load_rollout(peer, weights_only=True)
        read(CHECKPOINTS / "modelopt" / "qwen3moe-w4a16_nvfp4")
