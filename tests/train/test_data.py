"""Packed sequences hold every token once an epoch and every document's true edges; bad data is refused in one line."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import documents as documents_mask
from burst_attention.train.data import (
    ByteTokenizer,
    PackedData,
    load_data,
    load_texts,
    load_tokenizer,
    sequence_index,
)

END = 256
ABC = [b"aa", b"bbb", b"c"]


def packed(documents: Sequence[Sequence[int]] = ABC, tokens: int = 5, seed: int = 0) -> PackedData:
    return PackedData(documents, end=END, tokens=tokens, seed=seed)


def slow_sequence(
    documents: Sequence[Sequence[int]], tokens: int, seed: int, index: int
) -> tuple[list[int], tuple[int, ...]]:
    """The same sequence, token by token: each token carries which appearance of which document it belongs to."""
    documents = [[*ids, END] for ids in documents if len(ids)]
    total = sum(map(len, documents))
    epoch, skip = divmod(index * tokens, total)
    row: list[tuple[int, tuple[int, int]]] = []
    while len(row) < skip + tokens:
        generator = random.Random(f"{seed}-{epoch}")
        for _, which in sorted((generator.random(), which) for which in range(len(documents))):
            row += [(token, (epoch, which)) for token in documents[which]]
        epoch += 1
    cut = row[skip : skip + tokens]
    lengths = [1]
    for (_, before), (_, here) in pairwise(cut):
        if here == before:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return [token for token, _ in cut], tuple(lengths)


some_documents = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=6).filter(any)


@given(some_documents, st.integers(2, 40), st.integers(0, 3), st.integers(0, 30) | st.integers(10**9, 10**9 + 30))
@settings(max_examples=200, deadline=None)
def test_sequences_are_those_of_the_slow_way(documents: list[list[int]], tokens: int, seed: int, index: int) -> None:
    sequence = packed(documents, tokens, seed).sequence(index)
    assert (sequence.input_ids.tolist(), sequence.documents) == slow_sequence(documents, tokens, seed, index)
    assert sequence.input_ids.dtype == torch.int64 and sequence.input_ids.shape == (tokens,)
    documents_mask(sequence.documents).require_cover(tokens, tokens)


def test_sequences_stay_what_they_are() -> None:
    """Written out: a run that was saved must read the same tokens under a later version of Python or of this file."""
    data = packed()
    assert [data.sequence(index).documents for index in range(4)] == [(2, 3), (4, 1), (2, 2, 1), (3, 2)]
    got = "".join("." if token == END else chr(token) for i in range(4) for token in data.sequence(i).input_ids)
    assert got == "c.aa.bbb.aa.c.bbb.c."
    assert data.fingerprint == "e34a1e5372a77559c86a3e502ec70abc84dff964cc37e00f12abf350f0194cf0"


@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_no_token_is_lost_or_padded_over_epochs(tokens: int) -> None:
    documents = [bytes([which]) * (which % 5 + 1) for which in range(20)]
    data = packed(documents, tokens)
    row = [token for i in range(3 * data.epoch_tokens // tokens + 1) for token in data.sequence(i).input_ids.tolist()]
    orders = []
    for epoch in range(3):
        inside = row[epoch * data.epoch_tokens : (epoch + 1) * data.epoch_tokens]
        text = bytes(255 if token == END else token for token in inside)
        orders.append(text.removesuffix(b"\xff").split(b"\xff"))
        assert sorted(orders[-1]) == sorted(documents)
    assert orders[0] != orders[1] != orders[2] and orders[0] != documents
    assert data.num_documents == 20 and data.epoch_tokens == sum(map(len, documents)) + 20


def test_sequences_do_not_depend_on_what_was_read_before() -> None:
    indices = [0, 9, 3, 9, 500, 0, 1, 2]
    shared = packed(tokens=4)
    fresh = [packed(tokens=4).sequence(index) for index in indices]
    with ThreadPoolExecutor(4) as threads:
        for got, want in zip(threads.map(shared.sequence, indices), fresh, strict=True):
            assert got.input_ids.equal(want.input_ids) and got.documents == want.documents


def test_a_step_reads_the_same_sequences_however_they_are_shared() -> None:
    for step in (0, 1, 7):
        for replicas in (1, 2, 3, 4, 6, 12):
            accumulate = 12 // replicas
            read = [
                sequence_index(step, micro_batch, replica, accumulate=accumulate, replicas=replicas)
                for micro_batch in range(accumulate)
                for replica in range(replicas)
            ]
            assert read == list(range(12 * step, 12 * step + 12))


def test_data_shorter_than_a_sequence_comes_again() -> None:
    sequence = packed([b"xyz"], tokens=11).sequence(1)
    assert sequence.documents == (1, 4, 4, 2)
    assert sequence.input_ids.tolist() == [END, *b"xyz", END, *b"xyz", END, *b"xy"]


def test_another_seed_is_another_order() -> None:
    documents = [bytes([which]) for which in range(30)]
    orders = [packed(documents, 60, seed).sequence(0).input_ids.tolist() for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("largest", [255, 65535, 65536, 2**31 - 1])
def test_ids_of_any_size_are_kept(largest: int) -> None:
    data = PackedData([[largest, 0, largest - 1]], end=7, tokens=4, seed=0)
    assert data.sequence(0).input_ids.tolist() == [largest, 0, largest - 1, 7]


def test_the_fingerprint_is_of_all_that_decides_a_sequence() -> None:
    prints = [
        packed().fingerprint,
        packed(tokens=6).fingerprint,
        packed(seed=1).fingerprint,
        packed([b"aa", b"bbb", b"d"]).fingerprint,
        packed([b"bbb", b"aa", b"c"]).fingerprint,
        packed([*ABC, b"c"]).fingerprint,
        PackedData(ABC, end=257, tokens=5, seed=0).fingerprint,
        # The same ids in a row, once as two documents and once as one.
        packed([b"aa", b"bbb"]).fingerprint,
        packed([[*b"aa", END, *b"bbb"]]).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert packed([list(ids) for ids in ABC]).fingerprint == prints[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: packed([]), "the data has no tokens"),
        (lambda: packed([b"", []]), "the data has no tokens"),
        (lambda: packed(tokens=1), "tokens must be a whole number of at least 2, got 1"),
        (lambda: packed(tokens=2.0), "tokens must be a whole number of at least 2, got 2.0"),  # type: ignore[arg-type]
        (lambda: packed(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: packed([[3, -1]]), "token ids must be from 0 to 2147483647, got -1 to 3"),
        (lambda: packed([[2**31]]), "token ids must be from 0 to 2147483647, got 2147483648 to 2147483648"),
        (lambda: packed().sequence(-1), "sequences are counted from 0, got -1"),
    ],
)
def test_refused_packing(make: Callable[[], object], message: str) -> None:
    assert refusal(make) == message


def refusal(call: Callable[..., object], *args: object, **options: object) -> str:
    """The message of the ValueError that a call raises, which is one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the callers compare the whole message)
        call(*args, **options)
    assert caught.type is ValueError and "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    text = "one\r\n\n two\x00 três \u2028 end\n"
    assert load_texts(str(write(tmp_path / "odd.suffix", text))) == [("odd.suffix", text)]
    assert load_texts(str(write(tmp_path / "marked.txt", "\ufeffone"))) == [("marked.txt", "one")]


def test_a_folder_is_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.py", "D.TXT", "é.rst", "a/.git/x.txt", ".hidden.txt", "c.png", "empty.txt"):
        write(tmp_path / name, "" if name == "empty.txt" else name)
    write(tmp_path / "lines.jsonl", '{"text": "first"}\n{"text": "second"}\n')
    got = load_texts(str(tmp_path))
    assert [name for name, _ in got] == ["D.TXT", "a.py", "a/z.md", "b.txt", "lines.jsonl:1", "lines.jsonl:2", "é.rst"]
    assert [text for _, text in got][-3:] == ["first", "second", "é.rst"]


def test_json_lines_are_a_document_each(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a\\nb"}\r\n \r\n{"text": ""}\n{"text": "c\u2028d", "other": 1}')
    assert load_texts(str(path)) == [("x.jsonl:1", "a\nb"), ("x.jsonl:4", "c\u2028d")]
    path = write(tmp_path / "y.jsonl", '{"body": "z", "text": 3}')
    assert load_texts(str(path), text_key="body") == [("y.jsonl:1", "z")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"abc\xffdef", "'{path}' is not UTF-8: byte 0xff at offset 3"),
        ("x.txt", b"\xef\xbb\xbfabc\xe9", "'{path}' is not UTF-8: byte 0xe9 at offset 6"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "'{path}' is not UTF-8: byte 0xff at offset 24"),
        ("x.txt", b"", "the data at '{path}' is empty"),
        ("x.jsonl", b"\n\n", "the data at '{path}' is empty"),
        ("x.jsonl", b'{"text": ""}\n', "the data at '{path}' is empty"),
        (
            "x.jsonl",
            b'{"text": "a"}\n\n{"text": \n',
            "'{path}', line 3: broken JSON: Expecting value: line 1 column 10 (char 9)",
        ),
        ("x.jsonl", b"[" * 200000, "'{path}', line 1: broken JSON: {any}"),
        ("x.jsonl", b"[1]", "'{path}', line 1: not a JSON object with a key 'text'"),
        (
            "x.jsonl",
            b'{"b": 1, "a": 2}',
            "'{path}', line 1: no key 'text'; its keys are ['a', 'b']; choose one with text_key",
        ),
        ("x.jsonl", b'{"text": null}', "'{path}', line 1: 'text' is not a text but NoneType"),
        ("x.jsonl", b'{"text": "\\ud800"}', "'{path}', line 1: 'text' holds half a character (a lone surrogate)"),
    ],
)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_refused_files(tmp_path: Path, name: str, content: bytes, message: str, in_folder: bool) -> None:
    path = write(tmp_path / name, content)
    source = tmp_path if in_folder else path
    shown = source if message.startswith("the data at") else path
    got = refusal(load_texts, str(source))
    want = message.replace("{path}", str(shown))
    assert got.startswith(want.removesuffix("{any}")) and (got == want or want.endswith("{any}"))


def test_refused_places(tmp_path: Path) -> None:
    for source in (str(tmp_path / "none"), "", "a\0b", "x" * 5000):
        message = f"there is no data at {source!r}; give a file, a folder or 'stdlib'"
        assert refusal(load_texts, source) == message
    write(tmp_path / "only.png", "x")
    assert refusal(load_texts, str(tmp_path)).startswith(f"there are no text files in '{tmp_path}' (.txt ")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert refusal(load_texts, str(tmp_path)) == f"'{tmp_path}/gone.txt' is not a regular file"
    os.mkfifo(tmp_path / "pipe.txt")
    assert refusal(load_texts, str(tmp_path / "pipe.txt")) == f"'{tmp_path}/pipe.txt' is not a regular file"


def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the system's own words; the tests may run as root, who may read everything, so the system is played."""
    write(tmp_path / "x.txt", "x")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", denied)
        assert refusal(load_texts, str(tmp_path)) == f"cannot read '{tmp_path}/x.txt': Permission denied"
    monkeypatch.setattr(os, "scandir", denied)
    assert refusal(load_texts, str(tmp_path)) == f"cannot read folder '{tmp_path}': Permission denied"


def test_the_standard_library_is_enough_to_train_on_and_quick() -> None:
    start = time.process_time()
    data = load_data("stdlib", ByteTokenizer(), 4096, 0, vocab_size=257)
    assert time.process_time() - start < 5
    assert data.epoch_tokens > 5_000_000
    names = [name for name, _ in load_texts("stdlib")]
    assert names == sorted(names) and {"abc.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "test", "tests", "idlelib"} & set(name.split("/"))]
    assert not [name for name in names if "_sysconfigdata" in name or not name.endswith(".py")]


def test_only_the_standard_library_may_hold_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "latin.py", "# é".encode("latin-1"))
    write(tmp_path / "good.py", "pass")
    for name in ("site-packages/x.py", "json/tests/x.py", "_sysconfigdata_x.py", "config-3/x.py", "lib2to3/x.py"):
        write(tmp_path / name, "x")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert load_texts("stdlib") == [("good.py", "pass")]
    assert refusal(load_texts, str(tmp_path)).endswith("latin.py' is not UTF-8: byte 0xe9 at offset 2")


def test_bytes_there_and_back() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)
    assert list(tokenizer.encode("é!")) == [0xC3, 0xA9, 33]
    assert tokenizer.decode([*tokenizer.encode("né"), 256, 300, 0xC3]) == "né\ufffd"


def test_a_vocabulary_too_small_is_refused_before_the_data_is_read() -> None:
    assert refusal(lambda: load_data("nowhere", ByteTokenizer(), 8, 0, vocab_size=256)) == (
        "vocabulary mismatch: the tokenizer's ids go up to 256, but the model's vocabulary has 256; "
        "use the model's own tokenizer or a larger vocabulary"
    )


def test_load_data_reads_tokenizes_and_packs(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", "\n".join(json.dumps({"body": text}) for text in ("aa", "bbb", "c")))
    data = load_data(str(path), load_tokenizer("bytes"), 5, 0, vocab_size=300, text_key="body")
    assert data.fingerprint == packed().fingerprint and (data.tokens, data.seed) == (5, 0)


def saved_tokenizer(folder: Path, eos: str | None = "<end>") -> str:
    """A tokenizer of three words in a folder, with a gap before its last id."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<end>": 1, "long": 2, "ring": 9}, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "unk_token": "<unk>"}
    write(folder / "tokenizer.json", json.dumps(tokenizer))
    write(folder / "tokenizer_config.json", json.dumps(settings))
    return str(folder)


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved_tokenizer(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.end) == (10, 1)
    assert list(tokenizer.encode("long ring long what")) == [2, 9, 2, 0]
    assert tokenizer.decode([2, 9, 1]) == "long ring"


def test_refused_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(load_tokenizer, str(tmp_path)) == f"there is no tokenizer.json in '{tmp_path}'"
    use = "is not a folder; use 'bytes', a folder with tokenizer.json or a hub id"
    for name in ("", "./none", str(tmp_path / "none"), str(write(tmp_path / "file", "x"))):
        assert refusal(load_tokenizer, name) == f"tokenizer {name!r} {use}"
    folder = saved_tokenizer(tmp_path / "endless", eos=None)
    message = f"tokenizer {folder!r} has no end-of-text token (eos_token) to close documents with"
    assert refusal(load_tokenizer, folder) == message
    write(tmp_path / "broken/tokenizer.json", "{")
    broken = str(tmp_path / "broken")
    assert refusal(load_tokenizer, broken).startswith(f"cannot load tokenizer {broken!r}: ")
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "tokenizer 'some/name' needs transformers, which is not installed: pip install transformers"
    assert refusal(load_tokenizer, "some/name") == message


def test_a_hub_tokenizer_runs_no_code_of_its_own_and_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def from_pretrained(name: str, **options: object) -> None:
        calls.append((name, options))
        raise OSError("\nno network\nmore lines")

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    assert refusal(load_tokenizer, "some/name") == "cannot load tokenizer 'some/name': no network"
    assert calls == [("some/name", {"trust_remote_code": False, "local_files_only": False})]


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "number": [1, 2, 3]})
    rows.with_format("numpy").save_to_disk(str(tmp_path / "rows"))
    assert load_texts(str(tmp_path / "rows")) == [("rows:0", "one"), ("rows:2", "two")]
    datasets.DatasetDict(test=rows, train=rows.select([2])).save_to_disk(str(tmp_path / "splits"))
    assert load_texts(str(tmp_path / "splits")) == [("splits:0", "two")]
    assert refusal(load_texts, str(tmp_path / "rows"), text_key="body") == (
        f"'{tmp_path}/rows': no column 'body'; its columns are ['text', 'number']; choose with text_key"
    )
    message = f"'{tmp_path}/rows', row 0: 'number' is not a text but int"
    assert refusal(load_texts, str(tmp_path / "rows"), text_key="number") == message
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "other"))
    message = f"'{tmp_path}/other' has no split 'train'; give the folder of one of its splits ['test']"
    assert refusal(load_texts, str(tmp_path / "other")) == message
    write(tmp_path / "rows/state.json", "{")
    assert refusal(load_texts, str(tmp_path / "rows")).startswith(f"cannot load the saved dataset '{tmp_path}/rows': ")


def test_a_saved_folder_without_datasets_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path / "rows/state.json", "{}")
    write(tmp_path / "rows/dataset_info.json", "{}")
    write(tmp_path / "splits/dataset_dict.json", "{}")
    for name in ("rows", "splits"):
        assert refusal(load_texts, str(tmp_path / name)) == (
            f"'{tmp_path}/{name}' was saved by the library datasets, which is not installed: pip install datasets"
        )
