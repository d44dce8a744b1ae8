"""Folders that appear whole or not at all: written aside, synced, renamed, and checked against their own record."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
RECORD = "state.json"
WRITING = ".writing"
REPLACED = ".replaced"
REMOVING = ".removing"


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message is one line that names the file or rank, and the cause."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in the group and the group's size; a process on its own is rank 0 of 1."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def together(group: dist.ProcessGroup | None, act: Callable[[int, int], Result]) -> list[Result]:
    """Run `act(rank, size)` on every rank and return all results; where any fails, all raise the same CheckpointError.

    No rank goes on before every rank is done, so this is a barrier too.
    """
    rank, size = rank_and_size(group)
    outcome: tuple[Any, str | None]
    try:
        outcome = (act(rank, size), None)
    except CheckpointError as error:
        outcome = (None, str(error))
    except Exception as error:
        outcome = (None, f"rank {rank}: {described(error)}")
    outcomes: list[Any] = [outcome]
    if size > 1:
        outcomes = outcomes * size
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = list(dict.fromkeys(failure for _, failure in outcomes if failure is not None))
    if failures:
        raise CheckpointError(summed_up(failures))
    return [result for result, _ in outcomes]


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def summed_up(failures: list[str]) -> str:
    return failures[0] + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else "")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut; the files' contents are synced when they are written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def digest_of(path: Path) -> list[Any]:
    """A file's size in bytes and its SHA-256."""
    with path.open("rb") as stream:
        return [os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _canonical(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON with a digest of itself, so that one flipped digit in it is seen too."""
    text = json.dumps({"sha256": hashlib.sha256(_canonical(record).encode()).hexdigest(), "record": record}, indent=1)
    with (folder / RECORD).open("w") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote; anything else is a CheckpointError."""
    path = folder / RECORD
    try:
        whole = json.loads(path.read_bytes())
        record, digest = whole["record"], whole["sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not a whole checkpoint") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is corrupt: {described(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {described(error)}") from None
    if not isinstance(record, dict) or hashlib.sha256(_canonical(record).encode()).hexdigest() != digest:
        raise CheckpointError(f"{path} is corrupt: its contents do not match its own digest")
    return record


def check_files(folder: Path, record: dict[str, Any], rank: int = 0, size: int = 1) -> None:
    """Compare the files with the record: all names and sizes, and the digests of this rank's share of them."""
    files: dict[str, list[Any]] = record["files"]
    for name, (length, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != length:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {length}: truncated or replaced")
    for path in sorted(folder.rglob("*.safetensors")):
        if path.relative_to(folder).as_posix() not in files:
            raise CheckpointError(f"{path} does not belong to this checkpoint")
    for name in sorted(files)[rank::size]:
        if digest_of(folder / name) != files[name]:
            raise CheckpointError(f"{folder / name} is corrupt: its contents do not match the digest in {RECORD}")


def begin(final: Path) -> Path:
    """The empty folder aside in which `final` is to be written; what a broken-off attempt left there goes first."""
    aside = beside(final, WRITING)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    return aside


def commit(final: Path) -> None:
    """Rename the folder written aside to `final`: the one moment at which it begins to exist.

    A folder of that name is renamed first and removed last, so a whole one exists at every moment between.
    """
    aside, replaced = beside(final, WRITING), beside(final, REPLACED)
    for folder in [aside, *(path for path in aside.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.replace(final, replaced)
    os.replace(aside, final)
    sync_folder(final.parent)
    remove(replaced)


def remove(folder: Path) -> None:
    """Remove a folder that nobody needs; under another name first, so that half of it is never taken for a whole.

    That it cannot be removed is said and is no failure: what was to be saved is saved.
    """
    if not folder.exists():
        return
    try:
        doomed = folder if folder.name.endswith(REMOVING) else beside(folder, REMOVING)
        if doomed != folder:
            if doomed.exists():
                shutil.rmtree(doomed)
            os.replace(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed: {described(error)}", RuntimeWarning, stacklevel=2)


def beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def free_space(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free in {folder}"
    return f"free space in {folder} unknown"
