"""What was written: a file beside the shards with their SHA-256, and with what they were made from.

Scales of activations, and tensors that were not quantized, cannot be computed anew without the model or its source; by
their hashes ``verify`` and ``inspect`` notice every byte that has changed since. And whoever is asked for a checkpoint
that is there already can tell that it is.

    {"version": 1,
     "made_by": {"command": "quantize", "recipe": "aligned", ...},
     "files": {"model.safetensors": {"size": 1234, "sha256": "..."}}}

The entry of a file with tensors that were copied and hold NaN or inf lists them as "not_finite".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = "quads_qat_files.json"
VERSION = 1

FileRecord = tuple[int, str]
"""Size and SHA-256 of a file."""


def file_record(path: Path) -> FileRecord:
    """Of a file."""
    return path.stat().st_size, sha256(path)


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), bytearray(1 << 22)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def is_whole(file: Path, record: FileRecord) -> bool:
    """Whether a file is there, is no link, and has these bytes."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size != record[0]:
        return False
    return sha256(file) == record[1]


def record_text(
    job: Mapping[str, Any], files: Mapping[str, FileRecord], not_finite: Mapping[str, list[str]] | None = None
) -> str:
    """The content of the record. ``job``: all that the bytes depend on, as JSON; ``not_finite``: file -> names."""
    entries: dict[str, dict[str, Any]] = {}
    for file, (size, digest) in sorted(files.items()):
        entries[file] = {"size": size, "sha256": digest}
        if names := (not_finite or {}).get(file):
            entries[file]["not_finite"] = names
    return json.dumps({"version": VERSION, "made_by": job, "files": entries}, indent=2) + "\n"


def read_record(directory: Path) -> tuple[dict[str, Any], dict[str, FileRecord]] | None:
    """(job, files) of a directory; None where there is no record.

    Raises:
        ValueError: a record of a later version, or one that cannot be read.
    """
    found = _read(directory)
    return None if found is None else found[:2]


def not_finite(directory: Path) -> set[str]:
    """Names of tensors of the source that were copied and hold NaN or inf, of a directory with a record."""
    return set() if (found := _read(directory)) is None else found[2]


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, FileRecord], set[str]] | None:
    path = directory / RECORD
    try:
        loaded = json.loads(path.read_text("utf-8"))
        version = loaded["version"]
        files = {file: (entry["size"], entry["sha256"]) for file, entry in loaded["files"].items()}
        job = dict(loaded["made_by"])
        lists = [entry.get("not_finite", []) for entry in loaded["files"].values()]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            raise ValueError("not_finite must list names")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it if you do not need it") from error
    if version != VERSION or not all(_is_plain(file) for file in files):
        raise ValueError(f"{path}: version {version!r} or its names of files are not known here; remove it, or update")
    return job, files, {name for names in lists for name in names}


def _is_plain(file: str) -> bool:
    return Path(file).name == file and file not in ("", ".", "..") and "\0" not in file


def changed_files(directory: Path) -> dict[str, str]:
    """File -> what is wrong with it, of those that are not as the record of the directory has them."""
    found = read_record(directory)
    if found is None:
        return {}
    wrong = {}
    for file, record in found[1].items():
        path = directory / file
        if not path.is_file():
            wrong[file] = f"is missing, but {RECORD} lists it"
        elif not is_whole(path.resolve(), record):  # a cache of the Hub holds links
            wrong[file] = f"its bytes are not those that were written (SHA-256 in {RECORD}); make or download it again"
    return wrong


def is_complete(directory: Path, job: Mapping[str, Any]) -> bool:
    """Whether ``directory`` holds what ``job`` makes, whole. False where it holds no finished checkpoint of ours.

    Raises:
        ValueError: a finished checkpoint of another job, or one whose files have changed since.
    """
    try:
        if directory.is_symlink() or not (directory / "config.json").is_file():
            return False
    except OSError:  # a name that no file can have; whoever makes the directory says so
        return False
    found = read_record(directory)
    if found is None:
        return False
    if different := differences(found[0], job):
        raise ValueError(
            f"{directory} exists already; remove it or choose another destination (it was made otherwise: {different})"
        )
    for file, why in changed_files(directory).items():
        raise ValueError(f"{directory} exists already, but {file}: {why}; remove the directory to make it anew")
    return True


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In which settings two jobs differ, in words; "" where they are the same."""
    ours = json.loads(json.dumps(ours))
    if theirs == ours:
        return ""
    keys = [key for key in ours if theirs and theirs.get(key) != ours[key]]
    keys = keys[:1] if keys[:1] == ["command"] else [key for key in keys if not _FOLLOWS.get(key, set()) & {*keys}]
    said = (_DIGESTS.get(key) or f"{key} is {theirs.get(key)!r}, not {ours[key]!r}" for key in keys)
    return "; ".join(said) or "its record says nothing"


_DIGESTS = {
    "shards": "its tensors are in other shards: give the size that it was begun with (shard_bytes=, --max-shard-size)",
    "source": "its source was another one, or has changed since",
    "activations": "its activation scales come from something else (activations=, calibrate=)",
}
"""Of these settings a job holds a digest, which tells a reader nothing."""

_SELECTION = {"dialect", "scope", "include", "exclude"}
_FOLLOWS = {"shards": {*_SELECTION, "dtype", "activations", "source"}, "activations": _SELECTION}
"""Digest -> settings that it differs with anyway: it is no reason of its own beside them."""
