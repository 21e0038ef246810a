"""A checkpoint directory while it is being made: locked, journaled, and continued after a kill.

The journal is a file in the directory: one line that says what is being made, then one line for each finished shard
with its SHA-256. A shard is written under a temporary name and renamed when it is whole and noted; config.json comes
last of all, so nothing that a killed process leaves can be taken for a checkpoint. Whoever comes next with the same job
keeps the shards whose hash is right and makes the others again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quads_qat.record import RECORD, FileRecord, differences, file_record, is_whole, record_text

JOURNAL = ".quads_qat.journal"
TEMPORARY = ".partial"
_NOT_FINITE = "not finite in "
"""With the name of a shard: a note."""


class Destination:
    """The directory that :func:`open_destination` gives.

    Attributes:
        path: the directory.
        finished: shards that were found whole, or have been finished since.
        notes: what :meth:`note` put down, also before a kill.
    """

    def __init__(
        self, path: Path, journal: int, job: dict[str, Any], recorded: dict[str, FileRecord], notes: dict[str, Any]
    ) -> None:
        self.path, self._journal, self._job, self.notes = path, journal, job, notes
        self.finished = {file: record for file, record in recorded.items() if is_whole(path / file, record)}
        self._written = {path / file for file in recorded}

    def temporary(self, file: str) -> Path:
        """Where to write ``file``: a name that nothing has."""
        path = self.path / (file.replace("/", "--") + TEMPORARY)
        path.unlink(missing_ok=True)
        return path

    def finish_shard(self, file: str, not_finite: Iterable[str] = ()) -> None:
        """Note a shard that is whole under its temporary name in the journal, and give it its own.

        ``not_finite``: names for the record, of what was copied into it and holds NaN or inf.
        """
        if names := sorted(not_finite):  # before the shard: one that is finished has them
            self.note(_NOT_FINITE + file, names)
        size, digest = file_record(self.path / f"{file}{TEMPORARY}")
        _append(self._journal, {"shard": file, "size": size, "sha256": digest})
        self._publish(file)
        self.finished[file] = size, digest

    def note(self, key: str, value: Any) -> None:
        """Put a result in the journal that the next run must not compute anew."""
        self.notes[key] = value
        _append(self._journal, {"note": key, "value": value})

    def write_text(self, file: str, text: str) -> None:
        """Write a small file, whole or not at all."""
        with open(self.temporary(file), "x", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        self._publish(file)

    def copy(self, source: Path, file: str) -> None:
        """Copy a file, whole or not at all; ``file`` may be in folders inside the directory."""
        folder = self.path
        for part in Path(file).parts[:-1]:
            folder /= part
            if folder.is_symlink():
                raise ValueError(f"{folder} is a symbolic link; nothing is written outside of {self.path}; remove it")
            folder.mkdir(exist_ok=True)
        temporary = self.temporary(file)
        shutil.copyfile(source, temporary)
        sync(temporary)
        self._publish(file)

    def write_record(self) -> None:
        """Leave the hashes of all shards, and the job, for those who read the checkpoint."""
        not_finite = {file: self.notes.get(_NOT_FINITE + file, []) for file in self.finished}
        self.write_text(RECORD, record_text(self._job, self.finished, not_finite))

    def _publish(self, file: str) -> None:
        os.replace(self.path / (file.replace("/", "--") + TEMPORARY), self.path / file)
        self._written.add(self.path / file)

    def remove_all(self) -> None:
        """Remove what was written, and the journal."""
        for file in (*self._written, self.path / JOURNAL):
            file.unlink(missing_ok=True)
            if file.parent != self.path:
                with contextlib.suppress(OSError):
                    file.parent.rmdir()


@contextmanager
def open_destination(
    path: str | Path, job: dict[str, Any], check_space: Callable[[dict[str, FileRecord]], None]
) -> Iterator[Destination]:
    """Lock ``path`` and make or continue ``job`` there. When the block ends well, the directory is the checkpoint.

    When it does not, finished shards stay for the next run; without any, all that was written goes again.

    Args:
        path: a directory that is not there, is empty, or holds the same job, unfinished.
        job: what is made, as JSON: all that the bytes depend on.
        check_space: called with the finished shards before anything else is written.

    Raises:
        ValueError: ``path`` holds something else, another process writes there, or the system refuses to.
    """
    path = Path(path)
    destination, made = None, False
    try:
        made = _require_usable(path)
        if made:
            path.mkdir()
        with _locked_journal(path) as journal:
            new = os.fstat(journal).st_size == 0
            try:
                recorded, notes = _read_journal(path, journal, job)
            except BaseException:
                if new:  # of a directory that another process has finished meanwhile, or on a full disk
                    (path / JOURNAL).unlink()
                raise
            destination = Destination(path, journal, job, recorded, notes)
            try:
                check_space(destination.finished)
                yield destination
                sync(path)
                (path / JOURNAL).unlink()
            finally:
                _remove_temporaries(path)
                if (path / JOURNAL).exists() and not destination.finished:
                    destination.remove_all()
                    if made:
                        path.rmdir()
    except OSError as error:
        if made and destination is None:
            with contextlib.suppress(OSError):  # another process may have begun there
                path.rmdir()
        left = (
            "finished shards were kept: repeat the command to continue" if destination and destination.finished else ""
        )
        raise ValueError(
            f"{path}: could not be written ({error.strerror or error}); {left or 'nothing was left behind'}"
        ) from error


def _require_usable(path: Path) -> bool:
    """Whether the directory has to be made."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; give the directory itself")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.absolute().parent}: no such directory; create it first")
    if path.exists() and not (path.is_dir() and ((path / JOURNAL).exists() or not any(path.iterdir()))):
        raise ValueError(f"{path} exists already; remove it or choose another destination")
    return not path.exists()


@contextmanager
def _locked_journal(path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    journal = os.open(path / JOURNAL, flags, 0o666)
    try:
        if not _lock_if_there_are_locks(journal) or not _is(
            journal, path / JOURNAL
        ):  # or just finished, and removed, by another process
            raise ValueError(f"{path}: another process is writing there; wait for it, or choose another destination")
        yield journal
    finally:
        os.close(journal)


def lock(opened: int) -> bool:
    """Lock an open file or directory for this process; whether no other process has. Where there are no locks, True."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_if_there_are_locks(opened: int) -> bool:
    try:
        return lock(opened)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # Lustre and NFS, as they may be mounted
            return True
        raise


def _is(opened: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(opened), path.stat())


def _append(journal: int, line: dict[str, Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(journal, data) :]
    os.fsync(journal)


def _read_journal(path: Path, journal: int, job: dict[str, Any]) -> tuple[dict[str, FileRecord], dict[str, Any]]:
    """Shards that were finished, and notes; none in a new journal. A last line that was cut off does not count."""
    text = (path / JOURNAL).read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    os.ftruncate(journal, len(whole))
    lines = _lines(whole)
    job = json.loads(json.dumps(job))
    if not lines:
        if other := [file.name for file in path.iterdir() if file.name != JOURNAL]:
            raise ValueError(f"{path} exists already and holds {other[0]}; remove it or choose another destination")
        _append(journal, job)
        return {}, {}
    _require_same(path, lines[0], job)
    shards = [line for line in lines[1:] if "shard" in line and _is_plain(line["shard"])]
    notes = {line["note"]: line["value"] for line in lines[1:] if "note" in line}
    return {line["shard"]: (line["size"], line["sha256"]) for line in shards}, notes


def _lines(text: bytes) -> list[dict[str, Any]]:
    """The lines of a journal; [{}], which is no job, if that is none."""
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError):
        return [{}]
    sound = all(isinstance(line, dict) for line in lines) and all(_is_event(line) for line in lines[1:])
    return lines if sound else [{}]


def _is_event(line: dict[str, Any]) -> bool:
    """A note, or a shard."""
    if isinstance(line.get("note"), str):
        return "value" in line
    kinds = {"shard": str, "size": int, "sha256": str}
    return all(isinstance(line.get(key), kind) for key, kind in kinds.items())


def _is_plain(shard: str) -> bool:
    """It is a file of the directory itself."""
    return shard.endswith(".safetensors") and Path(shard).name == shard


def _require_same(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if different := differences(theirs, ours):
        different = different if theirs else "its journal cannot be read"
        raise ValueError(f"{path} holds another job, unfinished: {different}. Repeat that one, or remove the directory")


def _remove_temporaries(path: Path) -> None:
    for file in path.glob(f"*{TEMPORARY}"):
        file.unlink()


def sync(path: Path) -> None:
    """Have the system put a file, or the names in a directory, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
