"""What is trained on: texts, their tokens, and sequences packed from whole documents without padding.

All documents of an epoch stand in a shuffled row, the next epoch's follow them, and the row is cut every `tokens`
tokens. Three documents a, b, c in sequences of 5; each group of equal letters is one document to the mask:

    the row      a a a b b | b b c c b | b b b a a | a c c ...
    sequence     0           1           2           3
    documents    3, 2        2, 2, 1     3, 2        1, 2, ...

A document cut by an edge goes on in the next sequence as a document of its own. Sequence i is a function of the data,
`tokens`, `seed` and i alone, so that a run resumed on other ranks reads the same tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import sysconfig
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

STDLIB, BYTES = "stdlib", "bytes"
LINES_SUFFIX = ".jsonl"
SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts")
# Left out of the standard library: what others installed, tests, games, and what differs between builds of one Python.
_NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3")
_NOT_STDLIB_STARTS = (".", "config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class Tokenizer(Protocol):
    """Text to ids below `vocab_size`; `end` is the id that closes every document."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, text: str) -> Sequence[int]:
        """The text's ids, without `end`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Ids back to text, for reading what a model writes."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; 256 ends a document. Needs no file."""

    vocab_size: int = 257
    end: int = 256

    def encode(self, text: str) -> bytes:
        """The text in UTF-8: bytes are a sequence of ids already."""
        return text.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes to text; what no text has (half a character, `end`, a padded vocabulary's ids) does not stop it."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class PretrainedTokenizer:
    """A tokenizer of Hugging Face's transformers, from a local folder or the hub; the folder's own code never runs."""

    def __init__(self, name: str) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            raise ValueError(
                f"tokenizer {name!r} needs transformers, which is not installed: pip install transformers"
            ) from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, local_files_only=os.path.isdir(name)
            )
        except Exception as error:  # whatever is wrong with the files or the network, each with a type of its own
            raise ValueError(f"cannot load tokenizer {name!r}: {_first_line(error)}") from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {name!r} has no end-of-text token (eos_token) to close documents with")
        self.end = int(self._tokenizer.eos_token_id)
        # Ids may have gaps, so that the largest one counts, not how many there are.
        self.vocab_size = 1 + max(self.end, *self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> Sequence[int]:
        """The text's ids, without the tokens that a model's prompts begin or end with."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids back to text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or a local folder with a tokenizer.json, or the hub's of that name."""
    if name == BYTES:
        return ByteTokenizer()
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "tokenizer.json")):
            raise ValueError(f"there is no tokenizer.json in {name!r}")
    elif not name or name[0] in "./~" or os.path.exists(name):
        raise ValueError(f"tokenizer {name!r} is not a folder; use 'bytes', a folder with tokenizer.json or a hub id")
    return PretrainedTokenizer(name)


def load_texts(source: str, text_key: str = "text") -> list[tuple[str, str]]:
    """Read (name, text) of every document, in the same order on every machine.

    "stdlib" is the source of Python's own standard library; ./stdlib is a folder of that name. A file is one document,
    a .jsonl file one per line under `text_key`; a folder is all such files in it, hidden ones left out; a folder saved
    by the library datasets is one per row, of its split "train" where it has splits. Empty texts are left out.
    """
    path = Path(source)
    if source == STDLIB:
        texts = list(_stdlib_texts(Path(sysconfig.get_paths()["stdlib"])))
    elif not os.path.exists(source):  # false for what may not be looked at, where Path.exists raises
        raise ValueError(f"there is no data at {source!r}; give a file, a folder or {STDLIB!r}")
    elif not os.path.isdir(source):
        texts = list(_file_texts(path, path.name, text_key))
    elif (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("dataset_info.json", "state.json")
    ):
        texts = list(_saved_texts(path, text_key))
    else:
        names = _names_below(path, (*SUFFIXES, LINES_SUFFIX))
        if not names:
            raise ValueError(f"there are no text files in {source!r} ({' '.join((*SUFFIXES, LINES_SUFFIX))})")
        texts = [text for name in names for text in _file_texts(path / name, name, text_key)]
    texts = [(name, text) for name, text in texts if text]
    if not texts:
        raise ValueError(f"the data at {source!r} is empty")
    return texts


def _stdlib_texts(root: Path) -> Iterator[tuple[str, str]]:
    for name in _names_below(root, (".py",), _NOT_STDLIB, _NOT_STDLIB_STARTS):
        try:
            yield name, (root / name).read_bytes().decode()
        except UnicodeDecodeError:  # Python may write its own source in any encoding; nobody here can mend it
            continue


def _names_below(
    root: Path, suffixes: tuple[str, ...], without: tuple[str, ...] = (), without_starts: tuple[str, ...] = (".",)
) -> list[str]:
    """Names of files below a folder, relative and with slashes, sorted by code points as no locale would change."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read folder {str(error.filename)!r}: {error.strerror}")

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in without and not name.startswith(without_starts)]
        for name in files:
            if name.lower().endswith(suffixes) and not name.startswith(without_starts):
                found.append(Path(folder, name).relative_to(root).as_posix())
    return sorted(found)


def _file_texts(path: Path, name: str, text_key: str) -> Iterator[tuple[str, str]]:
    if not os.path.isfile(path):  # a pipe would block, and every rank reads the data anew
        raise ValueError(f"{str(path)!r} is not a regular file")
    try:
        # The mark that some editors write first says how the text is encoded and is no part of it.
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        ) from None
    if path.suffix.lower() != LINES_SUFFIX:
        yield name, text
        return
    # Not splitlines: JSON strings may hold other line separators as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{name}:{number}", _line_text(line, f"{str(path)!r}, line {number}", text_key)


def _line_text(line: str, where: str, text_key: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: broken JSON: {_first_line(error)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object with a key {text_key!r}")
    if text_key not in row:
        raise ValueError(f"{where}: no key {text_key!r}; its keys are {sorted(row)}; choose one with text_key")
    return _checked_text(row[text_key], where, text_key)


def _saved_texts(folder: Path, text_key: str) -> Iterator[tuple[str, str]]:
    """Rows of a folder that `save_to_disk` wrote: JSON and Arrow files, nothing that could be unpickled."""
    where = repr(str(folder))
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"{where} was saved by the library datasets, which is not installed: pip install datasets"
        ) from None
    bar: Any = importlib.import_module("tqdm").tqdm
    if not hasattr(bar, "_lock"):
        # The lock that its bars make is a semaphore of the system's, which a rank that ends at once leaves behind.
        bar.set_lock(threading.RLock())
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever is wrong with the files, each with a type of its own
        raise ValueError(f"cannot load the saved dataset {where}: {_first_line(error)}") from error
    if isinstance(saved, dict):
        if "train" not in saved:
            raise ValueError(f"{where} has no split 'train'; give the folder of one of its splits {sorted(saved)}")
        saved = saved["train"]
    if text_key not in saved.column_names:
        raise ValueError(f"{where}: no column {text_key!r}; its columns are {saved.column_names}; choose with text_key")
    for row, text in enumerate(saved.with_format(None)[text_key]):
        yield f"{folder.name}:{row}", _checked_text(text, f"{where}, row {row}", text_key)


def _checked_text(text: object, where: str, text_key: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {text_key!r} is not a text but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {text_key!r} holds half a character (a lone surrogate)") from None
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Packed:
    """One sequence: `input_ids` (tokens,) int64 and its documents' lengths in order, which sum to `tokens`."""

    input_ids: Tensor
    documents: tuple[int, ...]


class PackedData:
    """All documents' ids, each closed by `end`, as an endless row of sequences of `tokens` tokens.

    `fingerprint` tells whether a resumed run would read on where it stopped: it is equal where every sequence is. It
    covers what the tokenizer made, not the tokenizer's name or where the files lie, which may change.
    """

    def __init__(self, documents: Iterable[Sequence[int]], *, end: int, tokens: int, seed: int) -> None:
        for name, value, least in (("tokens", tokens, 2), ("end", end, 0), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        pieces = [piece for ids in documents if (piece := _id_tensor(ids)).numel()]
        if not pieces:
            raise ValueError("the data has no tokens")
        largest = max(end, max(int(piece.max()) for piece in pieces))
        self.tokens, self.seed = tokens, seed
        self._lengths = array("q", (piece.numel() + 1 for piece in pieces))
        self._stops = array("q", accumulate(self._lengths))
        dtype = torch.uint16 if largest < 2**16 else torch.int32
        # The tensor lies in a buffer that hashlib can read as well: neither numpy nor a copy is needed.
        buffer = bytearray(self.epoch_tokens * dtype.itemsize)
        self._ids = torch.frombuffer(buffer, dtype=dtype)
        for piece, stop in zip(pieces, self._stops, strict=True):
            self._ids[stop - 1 - piece.numel() : stop - 1] = piece
            self._ids[stop - 1] = end
        self.fingerprint = _fingerprint(f"{tokens} {seed} {dtype}".encode(), self._lengths.tobytes(), buffer)
        # Two, for a sequence that runs from one epoch into the next. Ranks that are threads may share it.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    @property
    def epoch_tokens(self) -> int:
        """Tokens of all documents together, their ends included."""
        return self._stops[-1]

    @property
    def num_documents(self) -> int:
        """How many documents an epoch has."""
        return len(self._lengths)

    def sequence(self, index: int) -> Packed:
        """The sequence with this number, counted over all replicas and steps since training began."""
        if index < 0:
            raise ValueError(f"sequences are counted from 0, got {index}")
        parts: list[Tensor] = []
        left = self.tokens
        epoch, position = divmod(index * self.tokens, self.epoch_tokens)
        while left:
            order, ends = self._epoch(epoch)
            for place in range(bisect_right(ends, position), len(order)):
                first = self._stops[order[place]] - (ends[place] - position)
                length = min(ends[place] - position, left)
                parts.append(self._ids[first : first + length])
                position += length
                left -= length
                if not left:
                    break
            epoch, position = epoch + 1, 0
        return Packed(torch.cat(parts).to(torch.int64), tuple(part.numel() for part in parts))

    def _make_epoch(self, epoch: int) -> tuple[array[int], array[int]]:
        """The epoch's order of documents, and where in the epoch each place of that order ends."""
        generator = random.Random(f"{self.seed}-{epoch}")
        # Python promises the same random() in every version, and does not promise it of shuffle.
        keys = [generator.random() for _ in self._lengths]
        order = array("q", sorted(range(len(keys)), key=keys.__getitem__))
        return order, array("q", accumulate(self._lengths[document] for document in order))


def sequence_index(step: int, micro_batch: int, replica: int, *, accumulate: int, replicas: int) -> int:
    """Which sequence a replica reads: a step takes the same ones however replicas and micro-batches share them."""
    return (step * accumulate + micro_batch) * replicas + replica


def load_data(
    source: str,
    tokenizer: Tokenizer,
    tokens: int,
    seed: int,
    vocab_size: int | None = None,
    text_key: str = "text",
) -> PackedData:
    """Read, tokenize and pack the data at `source` (see `load_texts`) for a model with `vocab_size` embeddings."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"vocabulary mismatch: the tokenizer's ids go up to {tokenizer.vocab_size - 1}, "
            f"but the model's vocabulary has {vocab_size}; use the model's own tokenizer or a larger vocabulary"
        )
    texts = load_texts(source, text_key)
    return PackedData((tokenizer.encode(text) for _, text in texts), end=tokenizer.end, tokens=tokens, seed=seed)


def _id_tensor(ids: Sequence[int]) -> Tensor:
    """Ids as a tensor: bytes by their buffer, a hundred times faster than one by one."""
    if isinstance(ids, bytes):
        return torch.frombuffer(bytearray(ids), dtype=torch.uint8) if ids else torch.empty(0, dtype=torch.uint8)
    if not 0 <= min(ids, default=0) <= max(ids, default=0) < 2**31:
        raise ValueError(f"token ids must be from 0 to {2**31 - 1}, got {min(ids)} to {max(ids)}")
    return torch.tensor(ids, dtype=torch.int32)


def _fingerprint(*parts: bytes | bytearray) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
