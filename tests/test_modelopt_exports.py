"""Contract under test: with ``scope="all"`` and Model-Optimizer's recipe, the quantized modules, their names and their
bytes are those of Model-Optimizer's default export, on every architecture that it exports; what differs is listed.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from modelopt_exports import digests, load, model_digest
from tiny_models import tiny_model

import quads_qat as qq

EXPORTS = load()

#: Model-Optimizer writes names of the model in memory; ours are those of the checkpoint that was quantized.
NAMES_IN_MEMORY = {
    *("bailing_hybrid", "ernie4_5_vl_moe", "glm5_next", "hy_v4", "hy_v4_vl", "kimi_linear", "mistral_large4"),
    *("dots3_note_vl", "qwen3_5_moe", "qwen3_omni_moe", "qwen4_exp", "step3p7", "unlimited_ocr"),
}
#: Architecture -> weights that differ, and why.
DIFFERENT = {
    **dict.fromkeys(
        ("aria", "aria_vl", "openai_privacy_filter"),
        (r"\.experts\.", "stacks [E, K, N], which Model-Optimizer takes for [E, N, K]: its blocks run along N"),
    ),
    "diffusion_gemma": (r"\.decoder\.|encoder", "encoder and decoder share their weights; ours leaves them alone"),
    **dict.fromkeys(
        ("dots3_note_vl", "qwen3_omni_moe"),
        (r"audio.*\.[qkv]_proj|audio_encoder.*\.[qkv]_proj", "no sound was in the calibration: not seen as one group"),
    ),
    **dict.fromkeys(
        ("hy_v4", "hy_v4_vl"), (r"indexer\.weights_proj", "its input is cast first: not seen as one group")
    ),
    "inkling": (r"shared_experts", "a stack that Model-Optimizer leaves in high precision"),
    "jamba": (r"mamba\.dt_proj", "the mixer multiplies by this weight itself, past the module"),
}
#: Weights that are merged or permuted on disk, or of an unknown layout: refused, with the way out.
REFUSED = ("inkling2", "inkling2_vl", "inkling2_loop", "inkling2_loop_vl", "inkling_vl", "jetmoe", "lara_mini")


@pytest.mark.parametrize("arch", sorted(EXPORTS))
def test_modules_names_and_bytes(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    assert model_digest(model) == EXPORTS[arch]["model"], "random numbers differ here: make the file of digests anew"
    model.save_pretrained(tmp_path / "source")
    if arch in REFUSED:
        with pytest.raises(ValueError, match="exclude="):
            qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe="modelopt-ieee")
        return
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe="modelopt-ieee", workers=1)
    pattern, _ = DIFFERENT.get(arch, ("(?!)", ""))
    ours, theirs = (
        {name: digest for name, digest in found.items() if not re.search(pattern, name)}
        for found in (digests(tmp_path / "out"), EXPORTS[arch]["weights"])
    )
    assert theirs or arch == "diffusion_gemma"
    if arch in NAMES_IN_MEMORY:
        assert ours.keys() != theirs.keys()
        assert Counter(ours.values()) == Counter(theirs.values())
    else:
        assert ours == theirs


def test_the_lists_are_about_what_there_is() -> None:
    assert {*NAMES_IN_MEMORY, *DIFFERENT, *REFUSED} <= EXPORTS.keys()
    assert len(EXPORTS) > 80
    for arch, (pattern, _) in DIFFERENT.items():
        assert any(re.search(pattern, name) for name in EXPORTS[arch]["weights"]) or arch == "inkling"


@pytest.mark.parametrize("arch", sorted(DIFFERENT))
def test_what_is_listed_as_different_is(arch: str, tmp_path: Path) -> None:
    """An entry that is no longer true has to go."""
    tiny_model(arch).save_pretrained(tmp_path / "source")
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe="modelopt-ieee")
    ours, theirs = (
        Counter(digest for name, digest in found.items() if re.search(DIFFERENT[arch][0], name))
        for found in (digests(tmp_path / "out"), EXPORTS[arch]["weights"])
    )
    assert ours != theirs
