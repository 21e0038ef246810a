"""Reading and writing directories of safetensors: sharded, checked, and whole or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads_qat.record import RECORD
from quads_qat.resume import JOURNAL, lock, sync
from quads_qat.safetensors_file import Entry, read, read_header, read_pieces

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9


class Reader:
    """Tensors of a checkpoint directory by name, read when asked for; many threads may read.

    Every shard's header is read and checked at once, the tensors never more than one at a time.

    Raises:
        ValueError: no such directory, no config.json, no safetensors, a missing or corrupt shard, an index that says
            something else than the shards hold; says which.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such directory{_of_the_hub(str(path))}")
        _require_finished(self.path)
        self.config = read_json(self.path / "config.json")
        index = self.path / INDEX
        if index.exists():
            self._file_of = _weight_map(index)
        elif (self.path / SINGLE).exists():
            self._file_of = dict.fromkeys(read_header(self.path / SINGLE), SINGLE)
        else:
            raise ValueError(
                f"{self.path}: holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints can be read"
            )
        self.files = sorted(set(self._file_of.values()))
        self._entries: dict[str, Entry] = {}
        for file in self.files:
            self._add_shard(file)
        for name, file in self._file_of.items():
            if name not in self._entries:
                raise ValueError(f"{self.path / file} lacks {name}, which the index places there; it is damaged")

    def _add_shard(self, file: str) -> None:
        if not (self.path / file).exists():
            raise ValueError(f"{self.path}: shard {file} is missing; download or export the checkpoint again")
        for name, entry in read_header(self.path / file).items():
            placed = self._file_of.get(name)
            if placed is None:
                raise ValueError(f"{self.path / file} holds {name}, which {INDEX} does not list; correct the index")
            if placed == file:
                self._entries[name] = entry
            elif name in read_header(self.path / placed):
                raise ValueError(f"{self.path}: {name} is in {placed} and in {file}; remove one of the two")

    def names(self) -> list[str]:
        """All tensor names, in file order."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, index: int | None = None) -> Tensor:
        """Read one tensor, or its ``[index]`` alone: fresh, on the CPU."""
        entry = self.entry(name)
        return read(self.path / self._file_of[name], entry, index)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(byte offset, uint8 [n]) of one tensor, a little at a time."""
        return read_pieces(self.path / self._file_of[name], self.entry(name))

    def entry(self, name: str) -> Entry:
        """Dtype and shape of one tensor, from the header."""
        if name not in self._file_of:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        return self.entry(name).shape

    def dtype(self) -> torch.dtype:
        """What a model is to be loaded in where config.json does not say: fp16 if that alone is there, else bf16."""
        held = {entry.dtype for entry in self._entries.values()}
        return torch.float16 if torch.float16 in held and torch.bfloat16 not in held else torch.bfloat16

    def nbytes(self) -> int:
        """Size of all shards."""
        return sum((self.path / file).stat().st_size for file in self.files)


def _of_the_hub(path: str) -> str:
    """How to get a directory, where ``path`` looks like the name of a model on the Hugging Face Hub."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        return ""
    folder = path.rpartition("/")[2]
    return (
        f"; if this is a model of the Hugging Face Hub, download it and give its directory: hf download {path} "
        f"--local-dir {folder}"
    )


def _require_finished(path: Path) -> None:
    """Raise ValueError if a checkpoint is being made in the directory, or was when its process ended."""
    if not (path / JOURNAL).exists():
        return
    shards = len(list(path.glob("*.safetensors")))
    there = "1 shard is" if shards == 1 else f"{shards} shards are"
    raise ValueError(
        f"{path} is not finished ({there} there). If no process is making it, repeat the command that "
        "began it, with the same options: it keeps what is there and continues; or remove the directory"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard, as the index has it.

    Raises:
        ValueError: no weight_map, or a shard that is not a plain file name.
    """
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index}: must hold a weight_map of tensor name -> file; download it again")
    for name, file in found.items():
        if not re.fullmatch(r"[^/\\\x00-\x1f]+\.safetensors", file):
            raise ValueError(f"{index}: places {name} in {file!r}; a shard must be a safetensors file beside the index")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError with the file's name if there is none."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return loaded


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` with the indent that Hugging Face uses."""
    path.write_text(json_text(value), encoding="utf-8")


def json_text(value: dict[str, Any]) -> str:
    """``value`` with the indent that Hugging Face uses."""
    return json.dumps(value, indent=2, sort_keys=False) + "\n"


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json's content for weights of ``dtype``, under the name that it has for it, old or new.

    Nested configs follow if they are of the text model or say what the whole did; another tower may have another dtype.
    """
    name, keys = str(dtype).removeprefix("torch."), ("dtype", "torch_dtype")
    said = {config[key] for key in keys if isinstance(config.get(key), str)}

    def follows(part: dict[str, Any], is_text: bool) -> dict[str, Any]:
        changed = dict(part)
        for key, value in part.items():
            if isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
                changed[key] = follows(value, key == "text_config")
            elif key in keys and isinstance(value, str) and (is_text or value in said):
                changed[key] = name
        return changed

    top = {key: name for key in keys if key in config} or {"dtype": name}
    return follows(config, is_text=False) | top


def require_apart(source: Path, destination: Path) -> None:
    """Raise ValueError if both are one directory: no message may then advise to remove it."""
    try:
        same = destination.samefile(source)
    except OSError:  # one is not there, or cannot be; whoever opens it says so
        same = False
    if same:
        raise ValueError(f"{destination}: source and destination are the same directory; choose another destination")


def require_free(destination: Path) -> Path:
    """Raise ValueError unless a directory can be made at ``destination``; its parent."""
    if destination.is_symlink():
        raise ValueError(f"{destination} is a symbolic link; give the directory itself")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; remove it or choose another destination")
    parent = destination.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{parent}: no such directory; create it first")
    return parent


@contextmanager
def whole_directory(destination: str | Path) -> Iterator[Path]:
    """A temporary directory beside ``destination`` that takes its name when the block ends well, and goes otherwise.

    A process killed inside the block leaves a directory ``.<name>.*.partial``, never a checkpoint that looks whole; the
    next call for the same name on that host removes it, where the file system has locks.

    Raises:
        ValueError: ``destination`` is a link or exists and is not an empty directory, or its parent is not there.
    """
    destination = Path(destination)
    remove_abandoned(destination)
    parent = require_free(destination)
    partial, opened = None, -1
    try:
        partial, opened = _locked_directory(parent, f".{destination.name}.")
        partial.chmod(0o755)
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        if destination.exists():
            destination.rmdir()
        os.rename(partial, destination)
        sync(parent)
    except OSError as error:
        raise ValueError(
            f"{destination}: could not be written ({error.strerror or error}); nothing was left behind"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if opened >= 0:
            os.close(opened)


def _locked_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new temporary directory, open and locked: the lock goes with the process, so that others see whether it lives.

    Another process may find it before it is locked, take it for abandoned and remove it; then there is a next one.
    """
    while True:
        partial = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=parent))
        opened, mine = -1, True
        try:
            opened = os.open(partial, os.O_RDONLY)
            with contextlib.suppress(OSError):  # some file systems have no locks
                mine = lock(opened)
            if mine and os.path.samestat(os.fstat(opened), partial.stat()):
                return partial, opened
        except FileNotFoundError:
            pass
        if opened >= 0:
            os.close(opened)


def remove_abandoned(destination: Path) -> None:
    """Remove the temporary directories of processes that were killed while they made ``destination``."""
    parent, prefix = destination.absolute().parent, f".{destination.name}."
    found: list[Path] = []
    with contextlib.suppress(OSError):  # no such directory, say: whoever writes there says so
        found = [p for p in parent.iterdir() if p.name.startswith(prefix) and p.name.endswith(".partial")]
    for path in found:
        if path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # no locks on this file system, another user's: it stays
            opened = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            try:
                if lock(opened):
                    shutil.rmtree(path)
            finally:
                os.close(opened)


_NOT_COMPANIONS = {"config.json", "hf_quant_config.json", INDEX, RECORD}
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz"),
    *(".onnx", ".onnx_data", ".tflite", ".pkl"),
}


def companions(source: Path) -> dict[str, int]:
    """What belongs to a model besides weights and config.json: file -> size.

    That is tokenizer, generation config, code and templates: files of the directory itself; of folders, chat templates,
    and Python files where the model brings its code.

    Raises:
        ValueError: a link that leads nowhere.
    """
    found = [path for path in source.iterdir() if not path.name.startswith(".") and not path.is_dir()]
    found += (source / "additional_chat_templates").glob("*.jinja")
    if any(path.suffix == ".py" for path in found):
        inside = (path.relative_to(source) for path in source.glob("*/**/*.py"))  # the source may be in ~/.cache
        found += [source / path for path in inside if not any(part.startswith(".") for part in path.parts)]
    sizes = {}
    for path in sorted(found):
        if path.suffix in _WEIGHTS or path.name.endswith(".index.json") or path.name in _NOT_COMPANIONS:
            continue
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link that leads nowhere; download it again or remove it")
        if path.is_file():
            sizes[path.relative_to(source).as_posix()] = path.stat().st_size
    return sizes


_SIGNS = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "Model-Optimizer",
}
_SIGNS_IN_NAMES = {
    r"\.qweight$": "GPTQ or AWQ",
    r"(\.|_)weight_scale_inv$": "FP8 in blocks",
    r"_blocks$": "MXFP4",
    r"\.weight_packed$": "compressed-tensors",
    r"(\.|_)weight_scale(_2)?$": "FP8 or NVFP4",
    r"\.quant_state\.|\.weight\.absmax$": "bitsandbytes",
}


def require_unquantized(reader: Reader) -> None:
    """Raise ValueError if config, files or tensor names say that the checkpoint was quantized, by whatever method."""
    if method := _quantized_by(reader):
        method = "quads_qat" if "quads_qat" in reader.config else method
        raise ValueError(
            f"{reader.path} is quantized already; quantize the original BF16 checkpoint. It was made by {method}"
        )


def _quantized_by(reader: Reader) -> str | None:
    for config in (reader.config, *(value for value in reader.config.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := config.get(key), dict):
                return str(found.get("quant_method") or found.get("quant_algo") or key)
    for file, method in _SIGNS.items():
        if (reader.path / file).exists():
            return f"{method} ({file})"
    for name in reader.names():
        for pattern, method in _SIGNS_IN_NAMES.items():
            if re.search(pattern, name):
                return f"{method} ({name})"
    return None
