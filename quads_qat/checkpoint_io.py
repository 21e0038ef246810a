"""Reading and writing directories of safetensors: sharded, checked, and whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9


class Reader:
    """Tensors of a checkpoint directory by name, read when asked for.

    Raises:
        ValueError: no such directory, no config.json, no safetensors, a missing or corrupt shard; says which.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such directory")
        self.config = read_json(self.path / "config.json")
        index = self.path / INDEX
        if index.exists():
            self._file_of: dict[str, str] = read_json(index).get("weight_map") or {}
            if (
                not self._file_of
                or not isinstance(self._file_of, dict)
                or not all(isinstance(f, str) for f in self._file_of.values())
            ):
                raise ValueError(f"{index}: must hold a weight_map of tensor name -> file; download it again")
        elif (self.path / SINGLE).exists():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(
                f"{self.path}: holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints can be read"
            )
        self._names_in: dict[str, list[str]] = {}
        for name, file in self._file_of.items():
            self._names_in.setdefault(file, []).append(name)
        for file in sorted(self._names_in):
            if not (self.path / file).exists():
                raise ValueError(f"{self.path}: shard {file} is missing; download or export the checkpoint again")
        self._handles: dict[str, Any] = {}

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path / file} is damaged ({error}); download or export it again") from error

    def _handle(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._handles:
            handle = self._open(file)
            present = set(handle.keys())
            absent = [n for n in self._names_in[file] if n not in present]
            if absent:
                raise ValueError(f"{self.path / file} lacks {absent[0]}, which the index places there; it is damaged")
            self._handles[file] = handle
        return self._handles[file]

    def names(self) -> list[str]:
        """All tensor names, in file order."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, index: int | None = None) -> Tensor:
        """Read one tensor, or its ``[index]`` alone."""
        if name not in self._file_of:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        handle = self._handle(name)
        return handle.get_tensor(name) if index is None else handle.get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def nbytes(self) -> int:
        """Size of all shards."""
        return sum((self.path / file).stat().st_size for file in self._names_in)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError with the file's name if there is none."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return loaded


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` with the indent that Hugging Face uses."""
    path.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n", encoding="utf-8")


@contextmanager
def whole_directory(destination: str | Path) -> Iterator[Path]:
    """A temporary directory beside ``destination`` that takes its name when the block ends well, and goes otherwise.

    A process killed inside the block leaves a directory ``.<name>.*.partial``, never a checkpoint that looks whole.

    Raises:
        ValueError: ``destination`` exists and is not an empty directory, or its parent is not there.
    """
    destination = Path(destination)
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; remove it or choose another destination")
    parent = destination.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{parent}: no such directory; create it first")
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=parent))
        partial.chmod(0o755)
        yield partial
        if destination.exists():
            destination.rmdir()
        os.rename(partial, destination)
    except OSError as error:
        raise ValueError(
            f"{destination}: could not be written ({error.strerror or error}); nothing was left behind"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
    """Write a stream of tensors as safetensors shards with an index; one shard is in memory at a time.

    One shard alone is called ``model.safetensors`` and has no index. Returns the bytes of all tensors.
    """
    shard: dict[str, Tensor] = {}
    size = total = 0
    shards: list[list[str]] = []
    seen: set[str] = set()

    def flush() -> None:
        nonlocal shard, size
        _save(shard, directory / f"shard-{len(shards):05d}.tmp")
        shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
        if name in seen:
            raise ValueError(f"{name} would be written twice")
        seen.add(name)
        shard[name] = tensor.detach().cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-00000.tmp").rename(directory / SINGLE)
        return total
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i:05d}.tmp").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _save(shard: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes files that only their owner can read; an engine may run as another user
    except SafetensorError as error:  # a full disk comes as one of these
        raise OSError(0, str(error)) from error


def copy_companions(source: Path, destination: Path) -> None:
    """Copy what belongs to a model besides weights and config.json: tokenizer, generation config, code, templates."""
    skip = {"config.json", "hf_quant_config.json", INDEX}
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in skip and not file.name.startswith("."):
            shutil.copyfile(file, destination / file.name)
