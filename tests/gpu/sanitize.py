"""Our GPU kernels under NVIDIA's compute-sanitizer: `make sanitize`.

In kernels whose groups of warps differ (warp_specialize) racecheck reports races in the handshake that the compiler
makes to start and end them: the read of a task's number against the write of it. Those are counted apart and do not
fail this check. They are told by their lines: both ends at the kernel's head or at its call of warp_specialize, where
our own code reads and writes nothing. EMPTY is a control, whose groups do nothing with shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

ACCESS = re.compile(r"access at \S+ in (\S+):(\d+)")
DISPATCH = ("@gluon.jit", "def ", "gl.warp_specialize(")
TILES = Path(__file__).parents[2] / "src" / "burst_attention" / "tiles"
SMALL_CASES, EMPTY = "tests.gpu.small_cases", "tests.gpu.sanitize"


def is_dispatch(file: str, line: int) -> bool:
    """Whether a line is where the compiler's own handshake is accounted for."""
    folders = (TILES, Path(__file__).parent)
    source = next((folder / file for folder in folders if (folder / file).exists()), None)
    return source is not None and source.read_text().splitlines()[line - 1].strip().startswith(DISPATCH)


def races(report: str) -> tuple[int, list[str]]:
    """(reports on the handshake, all others) of racecheck's output."""
    dispatch, others = 0, []
    for entry in re.split(r"=========\s*\n", report):
        accesses = ACCESS.findall(entry)
        if "Race reported" not in entry:
            continue
        if accesses and all(is_dispatch(Path(file).name, int(line)) for file, line in accesses):
            dispatch += 1
        else:
            others.append(entry)
    return dispatch, others


def run(tool: str, module: str) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, "-m", module]
    return subprocess.run([*command, *(["empty"] if module == EMPTY else [])], capture_output=True, text=True)


def launch_empty() -> None:
    """A kernel of two groups of warps that do nothing with shared memory."""
    from tests.gpu.empty_groups import empty_groups_kernel

    out = torch.zeros(256, device="cuda")
    empty_groups_kernel[(64,)](out, num_warps=4)
    torch.cuda.synchronize()
    assert bool((out == 1).all())


def main() -> int:
    memory = run("memcheck", SMALL_CASES)
    print("memcheck:", memory.stdout.strip().splitlines()[-1])
    control, _ = races(run("racecheck", EMPTY).stdout)
    race = run("racecheck", SMALL_CASES)
    dispatch, others = races(race.stdout)
    print(f"racecheck: {len(others)} races; on the handshake {dispatch} reports, and {control} for an empty kernel")
    print(*others, sep="\n")
    finished = "float32" in memory.stdout and "float32" in race.stdout
    return 0 if finished and memory.returncode == 0 and not others else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["empty"]:
        launch_empty()
    else:
        sys.exit(main())
