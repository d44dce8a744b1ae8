"""Our GPU kernels under NVIDIA's compute-sanitizer: `make sanitize`.

In kernels whose groups of warps differ (warp_specialize) and meet at barriers in shared memory, racecheck reports races
in the handshake that the compiler makes to start and end them: the read of a task's number against the write of it.
They are false: a barrier of all threads stands between the two (tests/unit/test_offline_compile.py reads it from the
instructions), and a kernel that has no data in shared memory, only such barriers, is reported alike (the control
"meeting"; without barriers, "empty", it is not). They are counted apart and do not fail this check. They are told by
their lines: both ends at the kernel's head or at its call of warp_specialize, where our own code reads and writes
nothing.
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
SMALL_CASES = ("tests.gpu.small_cases",)
CONTROLS = {name: ("tests.gpu.sanitize", name) for name in ("empty", "meeting")}


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


def run(tool: str, module: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, "-m", *module]
    return subprocess.run(command, capture_output=True, text=True)


def launch_control(name: str) -> None:
    """One of the kernels of empty_groups.py."""
    from tests.gpu import empty_groups

    out = torch.zeros(256, device="cuda")
    getattr(empty_groups, f"{name}_groups_kernel")[(64,)](out, num_warps=4)
    torch.cuda.synchronize()
    assert bool((out == 1).all())


def main() -> int:
    memory = run("memcheck", SMALL_CASES)
    print("memcheck:", memory.stdout.strip().splitlines()[-1])
    controls = {name: races(run("racecheck", module).stdout)[0] for name, module in CONTROLS.items()}
    race = run("racecheck", SMALL_CASES)
    dispatch, others = races(race.stdout)
    print(f"racecheck: {len(others)} races; reports on the handshake: {dispatch}, and in the controls {controls}")
    print(*others, sep="\n")
    finished = "float32" in memory.stdout and "float32" in race.stdout
    return 0 if finished and memory.returncode == 0 and not others else 1


if __name__ == "__main__":
    if sys.argv[1:]:
        launch_control(sys.argv[1])
    else:
        sys.exit(main())
