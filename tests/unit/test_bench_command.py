"""`burst bench` refuses what it would not use, before it measures anything."""

from __future__ import annotations

import pytest

from burst_attention.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("local --only tax", "--only is not for bench local, but for gpu, hosts, loss, train"),
        ("local --flash FA4", "--flash is not for bench local, but for gpu"),
        ("gpu --tokens 4096", "--tokens is not for bench gpu, but for local"),
        ("gpu --trace drawn", "--trace is not for bench gpu, but for hosts"),
        ("gpu --repeat 0", "--repeat must be at least 1, got 0"),
        (
            "gpu --only taxes",
            "--only takes one of tax, variants, grid, memory, breakdown, tiles, sizes, masks, million",
        ),
        ("gpu --flash FA9", "--flash takes what torch can put under its flash operator, FA3, FA4; got 'FA9'"),
        ("train --only 4096", "--only takes one of '32768', "),
        ("local --tokens 0", "--tokens and --repeat must be at least 1, got 0 and 5"),
    ],
)
def test_it_refuses_in_a_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words.split()])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"burst bench: {said}") and told.err.count("\n") == 1 and not told.out
