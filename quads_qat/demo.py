"""The main job on a small real model: train quantization-aware, export, verify, roll out, measure the gap.

The model is a byte-level Qwen3-MoE with 7.2 M parameters that ships with the package (``data/tinymoe``). Three trainers
start from it: BF16, symmetric W4A4 QAT and W4A16 QAT. Each is exported, and rollouts are loaded from those files in
fp32, as the "other engine"; the trainers compute in bf16.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io
from quads_qat.config import Dialect, Mode, ResidualConfig
from quads_qat.convert import convert
from quads_qat.coverage import coverage
from quads_qat.diagnose import gap_stats
from quads_qat.export import export_checkpoint
from quads_qat.integrations.transformers import patch_transformers
from quads_qat.load import load_model, load_rollout
from quads_qat.quantize import quantize_checkpoint
from quads_qat.state import observe_activations
from quads_qat.verify import verify

DATA = Path(__file__).parent / "data" / "tinymoe"
TRAINERS = {"BF16": None, "W4A4 QAT": Mode.W4A4, "W4A16 QAT": Mode.W4A16}
ROLLOUTS = {
    "weights only": None,
    "naive W4A4": ResidualConfig(fraction=0.0),
    "W4A4 + residual 50 %": ResidualConfig(fraction=0.5),
}
_BATCH, _LENGTH, _RATE = 8, 256, 1e-4


@dataclass(frozen=True)
class Gap:
    """One cell of the result: how far a rollout is from a trainer on the same text.

    Attributes:
        trainer, rollout: which two.
        kl: KL(rollout, trainer) in nats per byte, over the whole vocabulary.
        mean, max: of abs(log pi_rollout - log pi_trainer) over the bytes of the text.
        perplexity: of the rollout, per byte.
    """

    trainer: str
    rollout: str
    kl: float
    mean: float
    max: float
    perplexity: float


def run(out: Path, steps: int, advance: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run the demo and write checkpoints, ``gap.png`` and ``result.json`` below ``out``.

    Args:
        out: directory for everything that is made; must not exist or be empty.
        steps: optimizer steps of each trainer.
        advance: called with a description before each of :func:`units` units of work.

    Returns:
        ``coverage``, ``checkpoints`` (what was verified), ``transformers`` (what the real client needed;
        None without compressed-tensors) and ``gaps``.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another directory with --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    text = (DATA / "heldout.txt").read_bytes()
    half = len(text) // 2
    result: dict[str, Any] = {"gaps": [], "checkpoints": {}, "transformers": None}
    for name, mode in TRAINERS.items():
        trainer = _train(mode, text[:half], steps, partial(advance, f"training {name}"))
        advance(f"exporting {name}")
        folder = out / name.lower().replace(" ", "-")
        if mode is Mode.W4A16:
            result["coverage"] = coverage(trainer).fraction
            result["checkpoints"] = _export_everything(trainer, folder)
            advance("loading with transformers")
            if find_spec("compressed_tensors") is not None:
                result["transformers"] = _load_with_transformers(folder / "compressed-tensors-w4a16")
        else:
            _export_for_rollout(trainer, mode, folder / "modelopt-w4a16")
        result["gaps"] += [
            vars(gap) for gap in _measure(name, trainer, folder / "modelopt-w4a16", text[half:], advance)
        ]
    _plot(result["gaps"], out / "gap.png")
    checkpoint_io.write_json(out / "result.json", result)
    return result


def units(steps: int) -> int:
    """How often :func:`run` advances."""
    return len(TRAINERS) * (steps + 1 + len(ROLLOUTS)) + 1


def _train(mode: Mode | None, text: bytes, steps: int, advance: Callable[[], None]) -> nn.Module:
    """Fine-tune fp32 masters on the first half of the text; the last steps' activations are observed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DATA, dtype=torch.float32)
    if mode is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that W4A4 is for ablations is what the demo shows
            convert(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        advance()
        starts = torch.randint(0, len(text) - _LENGTH, (_BATCH,), generator=generator).tolist()
        ids = torch.tensor([list(text[s : s + _LENGTH]) for s in starts])
        with observe_activations(model) if mode is Mode.W4A16 and step >= steps - 4 else nullcontext():
            model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def _export_everything(trainer: nn.Module, folder: Path) -> dict[str, str]:
    """Both dialects, weight-only and W4A4; each verified bit for bit."""
    folder.mkdir()
    verified = {}
    for dialect in Dialect:
        for kind, activations in (("w4a16", "none"), ("w4a4", "observed")):
            path = folder / f"{dialect}-{kind}"
            export_checkpoint(trainer, path, dialect=dialect, source=DATA, activations=activations)
            verified[path.name] = str(verify(trainer, path))
    return verified


def _in_bf16(model: nn.Module) -> nn.Module:
    """BF16 parameters, buffers as they are: ``.to`` would round rotary frequencies, which loading in BF16 does not."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _export_for_rollout(trainer: nn.Module, mode: Mode | None, path: Path) -> None:
    path.parent.mkdir()
    if mode is not None:
        export_checkpoint(trainer, path, dialect=Dialect.MODELOPT, source=DATA)
        return
    plain = path.parent / "bf16"  # a trainer that knows nothing of quantization: its checkpoint is quantized afterwards
    _in_bf16(trainer).save_pretrained(plain)  # pyright: ignore[reportCallIssue]
    quantize_checkpoint(plain, path, dialect=Dialect.MODELOPT)


def _load_with_transformers(path: Path) -> dict[str, bool]:
    """Load the compressed-tensors checkpoint as a user of transformers would, and compare logits."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(64)[None]
    with torch.no_grad(), redirect_stderr(io.StringIO()):  # compressed-tensors draws progress bars of its own
        expected = load_model(path)(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        with patch_transformers() as patch:
            patched = AutoModelForCausalLM.from_pretrained(path)(ids).logits
    return {
        "patch_needed": patch.needed,
        "equal_without_patch": torch.equal(plain, expected),
        "equal_with_patch": torch.equal(patched, expected),
    }


def byte_tokenizer() -> Any:
    """The tokenizer of the bundled model as transformers wants one: id = byte, newline ends a text, byte 0 pads.

    >>> byte_tokenizer()("37+45=")["input_ids"] == list(b"37+45=")
    True
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # the rest goes by other letters
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + i) if byte not in b"\n\0" else chr(byte): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\n", pad_token="\0")


# -------------------------------------------------------------------------------------------------------- measurement


def _measure(name: str, trainer: nn.Module, path: Path, text: bytes, advance: Callable[[str], None]) -> Iterator[Gap]:
    """Gap of every rollout of one trainer, on text that no one trained on."""
    ids = torch.tensor([list(text[i : i + 512]) for i in range(0, 16 * 4096, 2 * 4096)])
    trained = _log_probs(_in_bf16(trainer), ids)
    for rollout_name, residual in ROLLOUTS.items():
        advance(f"measuring {name}")
        rolled = _log_probs(load_rollout(path, residual=residual, dtype=torch.float32), ids)
        chosen = [p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1) for p in (rolled, trained)]
        stats = gap_stats(*chosen)
        kl = (rolled.exp() * (rolled - trained)).sum(-1).mean().item()
        yield Gap(name, rollout_name, kl, stats.mean, stats.max, (-chosen[0].mean()).exp().item())


def _log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(row[None]).logits.float().log_softmax(-1) for row in ids])


def _plot(gaps: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    width = 0.8 / len(ROLLOUTS)
    for i, rollout in enumerate(ROLLOUTS):
        values = [g["kl"] for trainer in TRAINERS for g in gaps if (g["trainer"], g["rollout"]) == (trainer, rollout)]
        positions = [t + (i - (len(ROLLOUTS) - 1) / 2) * width for t in range(len(TRAINERS))]
        bars = axis.bar(positions, values, width * 0.95, label=f"{rollout} rollout")
        axis.bar_label(bars, fmt="%.4f", fontsize=8, padding=2)
    axis.set_xticks(range(len(TRAINERS)), [f"{t} trainer" for t in TRAINERS])
    axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.set_ylabel("KL(rollout, trainer), nats per byte")
    axis.set_title("Where the log-prob gap comes from: NVFP4 rollouts against their trainers")
    figure.legend(loc="outside lower center", ncols=len(ROLLOUTS), frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
