"""Contract under test: a killed ``quantize_checkpoint`` leaves nothing that looks whole, and the next call with the
same arguments gives the files that an uninterrupted one gives, byte for byte; finished shards are verified and kept."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, rewritten, tensors

import quads_qat as qq
from quads_qat import safetensors_file
from quads_qat.compare import inspect_checkpoint
from quads_qat.record import RECORD
from quads_qat.resume import JOURNAL

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"
OPTIONS: dict[str, Any] = {"shard_bytes": 20_000, "workers": 1}


def quantize(out: Path, **changed: Any) -> None:
    qq.quantize_checkpoint(changed.pop("source", SOURCE), out, **(OPTIONS | changed))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    quantize(out)
    found = contents(out)
    assert len([name for name in found if name.endswith(".safetensors")]) > 10
    assert JOURNAL not in found
    return found


# What a process does to the disk, in order; a child is killed at the n-th of them, in the middle of a write.
EVENTS = ("pwrite", "write", "replace", "fsync", "ftruncate", "mkdir", "unlink")


def in_child(call: Callable[[], None], kill_at: int | None) -> int:
    """Run ``call`` in a forked process that SIGKILLs itself at its n-th event; returns how many events there were."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # the OpenMP threads of the parent are not here
        count = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def event(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == kill_at:
                    if original.__name__ in ("pwrite", "write"):
                        original(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return event

        report = os.write
        for name in EVENTS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            call()
            report(write, str(count).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        count = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) == (kill_at is not None and not count), status
    return int(count) if count else -1


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, bytes]) -> int:
    out = tmp_path_factory.mktemp("events") / "out"
    count = in_child(lambda: quantize(out), None)
    assert contents(out) == expected
    return count


POINTS = [1, 2, 3, 4, 5, 6, *(i / 12 for i in range(1, 12)), -1, -2, -3, -4, -5, -6, -7, -8]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere(point: float, events: int, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    at = int(events * point) if isinstance(point, float) else point if point > 0 else events + 1 + point
    assert in_child(lambda: quantize(out), at) == -1
    if out.exists() and contents(out).keys() != expected.keys() | {JOURNAL}:
        assert not (out / "config.json").exists()
        said = r"config\.json is missing" if not (out / JOURNAL).exists() else r"out is not finished \(\d+ shards are"
        for read in (qq.load_model, inspect_checkpoint):
            with pytest.raises(ValueError, match=said):
                read(out)
    kept = {p.name: p.stat().st_ino for p in out.glob("*.safetensors")} if out.exists() else {}
    quantize(out)
    assert contents(out) == expected
    redone = [name for name, inode in kept.items() if (out / name).stat().st_ino != inode]
    assert redone == []


def test_one_kill_after_another(events: int, expected: dict[str, bytes], tmp_path: Path) -> None:
    out, found = tmp_path / "out", []
    for i in range(1, 8):
        in_child(lambda workers=1 + i % 2: quantize(out, workers=workers), 3 + events * i // 40)
        found.append(len(list(out.glob("*.safetensors"))))
    assert found == sorted(found)
    assert found[-1] > found[0]
    quantize(out, workers=2)
    assert contents(out) == expected


NVFP4 = CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4"
RECODINGS: dict[str, Callable[[Path], Any]] = {
    "dequantize": lambda out: qq.dequantize_checkpoint(NVFP4, out, **OPTIONS),
    "convert-dialect": lambda out: qq.convert_dialect(
        out.parent / "ours", out, dialect="compressed-tensors", **OPTIONS
    ),
}


@pytest.mark.parametrize("command", RECODINGS)
def test_what_is_recoded_is_continued_too(command: str, tmp_path: Path) -> None:
    if command == "convert-dialect":
        qq.quantize_checkpoint(SOURCE, tmp_path / "ours")
    make, out = RECODINGS[command], tmp_path / "out"
    count = in_child(lambda: make(tmp_path / "whole"), None)
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 10
    found = []
    for point in (0.2, 0.5, 0.9, -1):
        assert in_child(lambda: make(out), int(count * point) if point > 0 else None) == (-1 if point > 0 else count)
        found.append(len(list(out.glob("*.safetensors"))))
        assert (out / "config.json").exists() == (point < 0)
        if point > 0:
            with pytest.raises(ValueError, match="is not finished"):
                qq.load_model(out)
            shutil.copytree(out, tmp_path / str(point))
            make(tmp_path / str(point))
            assert contents(tmp_path / str(point)) == expected
            shutil.rmtree(out)
    assert found[0] < found[1] < found[2]
    assert make(out) is False
    assert contents(out) == expected


def half_done(out: Path, events: int) -> list[Path]:
    in_child(lambda: quantize(out), events // 2)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    return shards


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "gone": lambda path: path.unlink(),
    "a link": lambda path: (path.rename(path.parent.parent / "moved"), path.symlink_to(path.parent.parent / "moved")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_finished_shard_that_was_changed_is_made_again(
    how: str, events: int, expected: dict[str, bytes], tmp_path: Path
) -> None:
    shards = half_done(tmp_path / "out", events)
    inodes = [shard.stat().st_ino for shard in shards]
    DAMAGE[how](shards[1])
    quantize(tmp_path / "out")
    assert contents(tmp_path / "out") == expected
    now = [shard.stat().st_ino for shard in shards]
    assert now[1] != inodes[1] or how == "gone"  # a file system may use an inode again
    assert now[0] == inodes[0]
    assert now[2:] == inodes[2:]
    assert not any(shard.is_symlink() for shard in shards)


def test_a_journal_that_was_cut(events: int, expected: dict[str, bytes], tmp_path: Path) -> None:
    half_done(tmp_path / "out", events)
    journal = tmp_path / "out" / JOURNAL
    os.truncate(journal, journal.stat().st_size - 5)
    quantize(tmp_path / "out")
    assert contents(tmp_path / "out") == expected


def test_a_journal_that_is_none_or_leads_out(events: int, tmp_path: Path) -> None:
    half_done(tmp_path / "out", events)
    journal, precious = tmp_path / "out" / JOURNAL, tmp_path / "precious.safetensors"
    first, *_ = journal.read_text("utf-8").splitlines()
    precious.write_text("data")
    record = {"shard": "../precious.safetensors", "size": 4, "sha256": "0"}
    journal.write_text(f"{first}\n{json.dumps(record)}\n", "utf-8")
    with pytest.raises(ValueError, match=r"holds 1 NaN or inf"):
        quantize(tmp_path / "out", source=broken(tmp_path))
    assert precious.read_text("utf-8") == "data"
    for text in ("{}\n[1]\n", "no JSON\n", "\0\n"):
        journal.write_text(text, "utf-8")
        before = contents(tmp_path / "out")
        with pytest.raises(
            ValueError, match=r"out holds another job, unfinished: its journal cannot be read.* or remove"
        ):
            quantize(tmp_path / "out")
        assert contents(tmp_path / "out") == before


def broken(folder: Path) -> Path:
    """The source with a NaN, and the times of the original."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weight = tensors(SOURCE)[name].clone()
    weight[0, 0] = torch.nan
    source = rewritten(SOURCE, folder / "source", {name: weight})
    for file in ("config.json", "model.safetensors"):
        shutil.copystat(SOURCE / file, source / file)
    return source


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"recipe": "modelopt"}, r"recipe is 'aligned', not 'modelopt'"),
        ({"dialect": "compressed-tensors"}, r"dialect is 'modelopt', not 'compressed-tensors'"),
        ({"scope": "mlp"}, r"scope is 'all', not 'mlp'"),
        ({"exclude": ["*o_proj"]}, r"exclude is \[\], not \['\*o_proj'\]"),
        ({"shard_bytes": 30_000}, r"in other shards: give the size .*--max-shard-size\)\. Repeat"),
        ({"source": "copy"}, r"its source was another one"),
    ],
)
def test_another_job_is_refused(change: dict[str, Any], match: str, events: int, tmp_path: Path) -> None:
    half_done(tmp_path / "out", events)
    if "source" in change:
        change = {"source": shutil.copytree(SOURCE, tmp_path / "source", copy_function=shutil.copyfile)}
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=f"out holds another job, unfinished: .*{match}.*, or remove the dir"):
        quantize(tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before


def test_the_source_is_not_the_destination(tmp_path: Path) -> None:
    """Whose advice must not be to remove it."""
    source = shutil.copytree(SOURCE, tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path)
    before = contents(source)
    for destination in (source, tmp_path / "link" / "source"):
        with pytest.raises(ValueError, match="source and destination are the same directory; choose another dest"):
            qq.quantize_checkpoint(source, destination)
    packed = shutil.copytree(CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4", tmp_path / "packed")
    with pytest.raises(ValueError, match="source and destination are the same directory"):
        qq.dequantize_checkpoint(packed, packed)
    assert contents(source) == before


def test_two_at_once(expected: dict[str, bytes], tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def meanwhile(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(
                ValueError, match="out: another process is writing there; wait for it, or choose another"
            ):
                quantize(out)
            refused.append(done)

    quantize(out, progress=meanwhile)
    assert refused
    assert contents(out) == expected


def test_a_finished_one_is_not_made_again(expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert qq.quantize_checkpoint(SOURCE, out, **OPTIONS) is True
    times = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert qq.quantize_checkpoint(SOURCE, out, **OPTIONS) is False
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == times
    assert contents(out) == expected
    source = shutil.copytree(SOURCE, tmp_path / "source", copy_function=shutil.copyfile)
    other: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "modelopt"}, "recipe is 'aligned', not 'modelopt'"),
        ({"shard_bytes": 30_000}, r"in other shards: give the size .*--max-shard-size\)"),
        ({"source": source}, "its source was another one"),
        ({"residual": qq.ResidualConfig()}, "rollout is None, not "),
        (
            {"activations": CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4"},
            "its activation scales come from something else",
        ),
    ]
    for change, match in other:
        with pytest.raises(ValueError, match=rf"out exists already; remove .* \(it was made otherwise: .*{match}"):
            quantize(out, **change)
    with pytest.raises(ValueError, match=r"it was made otherwise: command is 'quantize', not 'dequantize'\)"):
        qq.dequantize_checkpoint(SOURCE.parents[1] / "modelopt" / "qwen3moe-nvfp4", out)
    assert contents(out) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"dialect": "compressed-tensors"},
        {"scope": "mlp"},
        {"exclude": ["*o_proj"]},
        {"dialect": "compressed-tensors", "exclude": ["*o_proj"]},
        {"activations": "none"},
    ],
    ids=str,
)
def test_only_what_was_asked_otherwise_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    """The layout of the shards, and the names of activation scales, differ on account of it."""
    out = tmp_path / "out"
    given: dict[str, Any] = {"activations": CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4", "workers": 1}
    qq.quantize_checkpoint(SOURCE, out, **given)
    with pytest.raises(ValueError, match="it was made otherwise: ") as error:
        qq.quantize_checkpoint(SOURCE, out, **(given | change))
    said = str(error.value)
    assert "--max-shard-size" not in said
    assert ("its activation scales" in said) == ("activations" in change)
    assert all(f"{key} is " in said for key in change if key != "activations")
    with pytest.raises(ValueError, match=r"recipe is .*; its tensors are in other shards: .*--max-shard-size"):
        qq.quantize_checkpoint(SOURCE, out, **given, recipe="modelopt", shard_bytes=30_000)


@pytest.mark.parametrize("how", ["a flipped bit", "cut", "gone"])
def test_a_finished_one_whose_shard_was_changed_is_not_taken_for_whole(how: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(out)
    shard = sorted(out.glob("*.safetensors"))[1]
    DAMAGE[how](shard)
    before = contents(out)
    with pytest.raises(ValueError, match=f"exists already, but {shard.name}: .*; remove the directory"):
        quantize(out)
    assert contents(out) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "made_by": {}, "files": {}}', '{"version": 1}', "null"])
def test_a_record_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    quantize(tmp_path / "out")
    (tmp_path / "out" / RECORD).write_text(text)
    with pytest.raises(ValueError, match=f"{RECORD}"):
        quantize(tmp_path / "out")
    qq.load_model(tmp_path / "out")  # it is for verify, not for loading
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(ValueError, match="out exists already; remove it or choose another destination"):
        quantize(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes], tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    quantize(tmp_path / "out")
    assert contents(tmp_path / "out") == expected


def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes], tmp_path: Path) -> None:
    out, pwrite = tmp_path / "out", os.pwrite
    for room, match in ((100, "nothing was left behind"), (150_000, "finished shards were kept: repeat the command")):
        left = [room]

        def limited(file: int, data: Any, at: int, left: list[int] = left) -> int:
            if len(data) > left[0]:
                raise OSError(28, "No space left on device")
            left[0] -= len(data)
            return pwrite(file, data, at)

        monkeypatch.setattr(safetensors_file.os, "pwrite", limited)
        with pytest.raises(ValueError, match=f"out: could not be written .No space left on device.; {match}"):
            quantize(out)
        monkeypatch.undo()
        assert out.exists() == (room > 1000)
    assert 1 < len(list(out.glob("*.safetensors"))) < len(expected)
    assert not list(out.glob("*.partial"))
    quantize(out)
    assert contents(out) == expected


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_destination_that_cannot_be_written(error: OSError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ValueError, match=f"out: could not be written .{error.strerror}.; nothing was left behind"):
        quantize(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_what_is_finished(expected: dict[str, bytes], tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "out", progress=interrupt)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert not list((tmp_path / "out").glob("*.partial"))
    seen: list[int] = []
    quantize(tmp_path / "out", progress=lambda done, total: seen.append(done))
    assert seen[0] > 0
    assert contents(tmp_path / "out") == expected


def test_links_in_the_destination(events: int, tmp_path: Path) -> None:
    """Nothing is written outside of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(ValueError, match="link is a symbolic link; give the directory itself"):
        quantize(tmp_path / "link")
    shards = half_done(tmp_path / "out", events)
    (tmp_path / "out" / "model-00020-of-00020.safetensors.partial").symlink_to(outside / "a")
    (tmp_path / "out" / "config.json").symlink_to(outside / "b")
    quantize(tmp_path / "out")
    assert shards
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "out" / "config.json").is_symlink()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / JOURNAL).symlink_to(outside / "c")
    with pytest.raises(ValueError, match=r"exists already|could not be written"):
        quantize(tmp_path / "new")
    assert list(outside.iterdir()) == []


def test_the_command_line_killed_from_outside_and_repeated(expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(SOURCE), str(out), "--weights-only", "--max-shard-size", "20KB", "--workers", "1"]
    slow = (
        "import sys, time; from quads_qat import cli, resume; finish = resume.Destination.finish_shard;"
        "resume.Destination.finish_shard = lambda *of: (finish(*of), time.sleep(0.5));"
        "sys.argv[0] = 'quads-qat'; cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], env=environment)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*.safetensors")) if out.exists() else []) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shards = len(list(out.glob("*.safetensors")))
    assert 2 <= shards < len(expected)
    assert not (out / "config.json").exists()
    quantize(out)
    assert contents(out) == expected
