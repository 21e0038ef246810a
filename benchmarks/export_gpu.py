"""A whole checkpoint, from disk to disk, quantized on a GPU: beside the disk itself, and the same on the CPU."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

import quads_qat as qq
from benchmarks.export_cpu import difference, make_source
from benchmarks.registry import Report, Row, benchmark

QUANTIZE = "quads_qat quantize --device"


@benchmark("export-gpu")
def export_gpu(
    layers: int = 4, experts: int = 64, hidden: int = 2048, intermediate: int = 768, rounds: int = 2, workers: int = 0
) -> Report:
    """Quantize a Qwen3-MoE checkpoint of random bf16 weights with ``device="cuda"``; its files are not in memory."""
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(folder) / "source"
        with torch.device(devices[0]):  # random numbers are made faster there
            elements = make_source(source, layers, experts, hidden, intermediate)
        report = Report(
            title=f"Quantize a checkpoint of {elements / 1e6:.0f} M bf16 weights, from disk to disk, device=cuda",
            unit_count=elements,
            unit="weights",
            packages=("torch", "triton", "transformers"),
            settings={
                "layers": layers,
                "experts": experts,
                "hidden": hidden,
                "intermediate": intermediate,
                "rounds": rounds,
                "workers": workers,
                "gpu": torch.cuda.get_device_name() if len(devices) > 1 else "",
            },
        )
        reference, out = Path(folder) / "reference", Path(folder) / "out"

        def quantize(device: str, to: Path = out) -> None:
            qq.quantize_checkpoint(source, to, device=device, workers=workers or None)

        progress = Console(stderr=True)
        quantize("cpu", reference)
        progress.print("reference made")
        for device in list(devices):
            quantize(device)
            if wrong := difference(out, reference):
                report.rows.append(Row(f"{QUANTIZE} {device}", None, note=f"not timed: {wrong}"))
                devices.remove(device)
            shutil.rmtree(out)
        calls: dict[str, Callable[[], object]] = {
            "read of the files": lambda: [_read(file) for file in _files(source)],
            "write of the result's bytes": lambda: _copy(reference, out),
            "copy of the files": lambda: _copy(source, out),
        }
        calls |= {f"{QUANTIZE} {device}": partial(quantize, device) for device in devices}
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(rounds):
            for name, call in calls.items():
                shutil.rmtree(out, ignore_errors=True)
                for file in _files(source):
                    _evict(file)
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                progress.print(f"{name}: {seconds:.2f} s")
                best[name] = min(best[name], seconds)
    size = 2 * elements / 1e9
    report.rows += [
        Row(name, seconds, note=f"{size / seconds:.2f} GB of bf16 a second") for name, seconds in best.items()
    ]
    return report


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def _evict(file: Path) -> None:
    """Out of the page cache, so that it is read from the disk."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as handle:
        while handle.read(1 << 24):
            pass


def _copy(source: Path, out: Path) -> None:
    """The tensors' files, synced to the disk as an export's are."""
    out.mkdir()
    for file in _files(source):
        with file.open("rb", buffering=0) as reader, (out / file.name).open("wb", buffering=0) as writer:
            while chunk := reader.read(1 << 24):
                writer.write(chunk)
            os.fsync(writer.fileno())
