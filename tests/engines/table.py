"""What each engine does with each architecture, dialect and scheme: ``data/engines.csv``, shown in docs/engines.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from engines_real.architectures import BUILT, NOT_BUILT
from tiny_models import ARCHITECTURES

from quads_qat.engine_limits import ENGINES, LIMITS

from . import sglang, tensorrt_llm, vllm
from .common import FUSION_IS_KNOWN, UNREAD, Checkpoint, LoadError, build

FILE = Path(__file__).parents[1] / "data" / "engines.csv"
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
COLUMNS = [(dialect, scheme) for dialect in ("modelopt", "compressed-tensors") for scheme in ("W4A16", "W4A4")]
ACTIVATIONS = {"W4A16": "none", "W4A4": "observed"}
_SERVING = Path(__file__).with_name("serving.md")
_GPUS = {80: "A100", 90: "H100, H200", 100: "B200", 120: "RTX 50, RTX PRO 6000"}


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        arch: a key of ``tiny_models.ARCHITECTURES``.
        cells: (dialect, scheme) -> engine -> ``pass``, the key of a limit, or ``? `` and a key of ``UNREAD``.
        kept: patterns of what no NVFP4 layout covers, which stays in high precision.
        unfused: leaf names of quantized linears of which no fusion rule was read.
    """

    arch: str
    cells: dict[tuple[str, str], dict[str, str]]
    kept: list[str]
    unfused: list[str]


def unfused(checkpoint: Checkpoint) -> set[str]:
    """Leaf names of dense quantized linears that the emulators take for linears that no engine fuses, unread."""
    matrices = checkpoint.matrices()
    dense = [shard for shards in build(checkpoint).dense.values() for shard in shards]
    packed = [name.split(".") for name in dense if matrices[name].dtype == torch.uint8]
    leaves = {".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1] for parts in packed}
    return leaves - FUSION_IS_KNOWN


# ----------------------------------------------------------------------------------------------------------------- file


def read() -> dict[str, Row]:
    """Architecture -> its row."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["architecture"]: Row(
            row["architecture"],
            {(d, s): {engine: row[f"{d} {s} {engine}"] for engine in ENGINES} for d, s in COLUMNS},
            row["kept"].split(),
            row["unfused"].split(),
        )
        for row in rows
    }


def write(rows: Iterable[Row]) -> None:
    """Replace the file."""
    header = ["architecture", *(f"{d} {s} {engine}" for d, s in COLUMNS for engine in ENGINES), "kept", "unfused"]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        for row in rows:
            cells = [row.cells[column][engine] for column in COLUMNS for engine in ENGINES]
            out.writerow([row.arch, *cells, " ".join(row.kept), " ".join(row.unfused)])


# ----------------------------------------------------------------------------------------------------------------- page


def page() -> str:
    """docs/engines.md."""
    rows = read()
    marks = {limit.key: str(i) for i, limit in enumerate(LIMITS, 1)}
    marks |= {f"? {key}": f"?{letter}" for key, letter in zip(UNREAD, "abcdefgh", strict=False)} | {"pass": "✓"}
    lines = [_INTRODUCTION.format(versions="\n".join(f"- **{name}**: {text}" for name, text in ENGINES.items()))]
    lines += ["| architecture | " + " | ".join(f"{d} {s}" for d, s in COLUMNS) + " | kept in high precision |"]
    lines += ["|---|" + ":-:|" * len(COLUMNS) + "---|"]
    for row in rows.values():
        cells = [" ".join(marks[row.cells[column][engine]] for engine in ENGINES) for column in COLUMNS]
        star = " \\*" if row.unfused else ""
        kept = ", ".join(f"`{pattern}`" for pattern in row.kept)
        name = f"{row.arch}{star} ({ARCHITECTURES[row.arch].model_class})"
        lines.append("| " + " | ".join([name, *cells, kept]) + " |")
    lines += ["", "## Known refusals", "", "Export warns of each (`quads_qat.EngineWarning`).", ""]
    for i, limit in enumerate(LIMITS, 1):
        lines.append(
            f"{i}. **{limit.engine}** ([{limit.key}]({limit.link})): {limit.reason}. Instead: {limit.way_out}."
        )
    lines += ["", "## Not known", "", "No rule was read for these; they may work.", ""]
    lines += [f"- ?{letter}: {text}." for letter, text in zip("abcdefgh", UNREAD.values(), strict=False)]
    lines += ["", _STAR, ""]
    for row in rows.values():
        if row.unfused:
            lines.append(f"- {row.arch}: " + ", ".join(f"`{leaf}`" for leaf in row.unfused))
    lines += ["", _RUN.rstrip(), "", ", ".join(BUILT) + ".", "", "Not built there:", ""]
    for reason in dict.fromkeys(NOT_BUILT.values()):
        lines.append(f"- {', '.join(arch for arch in NOT_BUILT if NOT_BUILT[arch] == reason)}: {reason}")
    lines += ["", _GPU.rstrip(), "", *_gpu_table(), "", _SERVING.read_text("utf-8").strip(), "", _RULES.strip(), ""]
    return "\n".join(lines)


def _gpu_table() -> list[str]:
    columns = [(name, module) for name, module in zip(ENGINES, (vllm, sglang, tensorrt_llm), strict=True)]
    lines = ["| checkpoint, GPU | " + " | ".join(name for name, _ in columns) + " |", "|---|" + ":-:|" * len(columns)]
    for scheme in ACTIVATIONS:
        for capability, gpus in _GPUS.items():
            cells = [_computes(module, scheme, capability) for _, module in columns]
            lines.append(f"| {scheme}, sm_{capability} ({gpus}) | " + " | ".join(cells) + " |")
    return lines


def _computes(engine: object, scheme: str, capability: int) -> str:
    try:
        found = engine.computes(scheme, capability)  # pyright: ignore[reportAttributeAccessIssue]
    except LoadError:
        return "refused"
    return f"**{found}**" if found not in (scheme, "?") else found


_INTRODUCTION = """\
# Which engine loads what

Written by `python -m engines` (in `tests/`) from `tests/data/engines.csv`; the test suite compares both with emulators
of what the engines do on load. No engine was run whole; vLLM's own layers and loaders were, [see below](#run-in-vllm).
The rules were read from:

{versions}

Engines in a cell: **vLLM, SGLang, TensorRT-LLM**. ✓: by these rules the engine reads the config, takes for quantized
what is, finds every tensor, and multiplies by exactly the weights, bit for bit, that the trainer multiplied by, with
the activation scales of the file. It says nothing about whether the engine has the model, or (but for what was run)
about renaming inside the code of single models. A number is a known refusal, ? an unread rule, \\* see below. Whole
models are quantized (`scope="all"`), but for what the last column names. `_vl` is a multimodal model where a text-only
class exists too.
"""
_STAR = """\
\\* These have quantized linears of which it was not read whether engines fuse them with others; the table takes
them for linears that stand alone. Linears that read the same input share one scale in our files, as in those of
Model-Optimizer, so that a fusion of them changes no number."""
_RUN = """\
## Run in vLLM

`make test-engines` builds tiny models of these architectures from vLLM 0.33.0's own classes on a CPU, fills every
parameter with NaN, loads our exports of both dialects, W4A16 and W4A4, through its loaders, and compares what it
decodes with the trainer's weights, bit for bit. Each cell of the table was confirmed so, the refusals included:"""
_GPU = """\
## What a GPU makes of it

Bold: not what the checkpoint says. A W4A4 checkpoint on Hopper is computed as W4A16 by vLLM (Humming's kernels, or
Marlin's) and SGLang (Marlin's), with a log line; measure W4A4 on Blackwell, with vLLM's emulation backend, or with the
[plugin](#serve-a-quads-checkpoint-with-vllm). TensorRT-LLM makes an exception for Nemotron-H on Hopper
(TensorRT-LLM#14775); its W4A16 needs TensorRT-LLM#15969 (Hopper) or #16511 (sm_120)."""
_RULES = """\
## The rules

- **Config.** vLLM and SGLang read `quantization_config` of config.json and look at hf_quant_config.json only without
  it; for TensorRT-LLM hf_quant_config.json wins, with a warning where they differ. Ours agree.
- **What is ignored**, ModelOpt dialect. vLLM: equal, *or contained in the name* (`model.layers.1` also hits layer 10),
  or a glob; SGLang: a regex for the whole name or any one component; TensorRT-LLM: a glob for the name or anything
  above it. So full names are written, and where one is part of a quantized module's name its last letter is in
  brackets.
- **What is ignored**, compressed-tensors. Exact names or `re:`; vLLM asks for experts under `...experts.0.gate_proj`,
  `up_proj`, `down_proj`, or `w1`, `w3`, `w2` where its model class calls them so. (Experts of gpt-oss that are left
  out in this dialect, and those of MiniMax-M2 in either, it takes for quantized all the same.)
- **Fused layers** (q/k/v, gate/up, w1/w3, q_a/kv_a, in_proj_qkv/z) have one scale: the largest (vLLM, SGLang), or they
  must be equal (TensorRT-LLM). vLLM's experts take the gate's for up too. Ours are equal, in the training forward
  already. A layer that is fused on disk fills every slot (since vllm#39765, sglang#29151).
- **Activation scales.** A missing one is whatever the memory held (vLLM), 1.0 (SGLang, ModelOpt dialect), or makes
  scales unequal (TensorRT-LLM). Experts: the largest of a layer, or each expert's own; ours are equal.
"""
