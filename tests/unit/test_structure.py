"""The house's order, held by tests: imports go one way, importing needs torch alone, files and functions stay small."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import burst_attention

PACKAGE = Path(burst_attention.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import those of earlier lines, and its neighbours within one package.
LAYERS = [
    {"version", "geometry", "kept", "lanes", "operators"},
    {"mask", "topology", "merge", "reference"},
    {"layout"},
    {"schedule"},
    {"options", "tiles", "ring"},
    {"work", "rank_setup"},
    {"agreement", "engine", "logits", "rendezvous"},
    {"ops", "loss"},
    {"heads_ops"},
    {"api"},
    {"burst_attention", "launch", "namespaces"},
    {"exactness", "hosts", "peers", "trace", "integrations"},
    {"check", "bench", "train"},
    {"bench_timing"},
    {"bench_tax", "bench_million", "bench_peers", "bench_loss", "bench_train"},
    {"bench_breakdown", "bench_memory"},
    {"bench_hosts"},
    {"bench_kernels"},
    {"bench_gpu"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    """The top-level part of the package that a file belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "burst_attention" if parts == ("__init__",) else parts[0]


def imports_of(path: Path) -> set[str]:
    """The parts of the package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            if parts[0] == "burst_attention":
                found.add(parts[1] if len(parts) > 1 else "burst_attention")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    module = module_of(path)
    for imported in imports_of(path) - {module}:
        assert LEVEL[imported] < LEVEL[module], f"{module} must not import {imported}"


def test_tiles_and_rings_never_import_each_other() -> None:
    for path in FILES:
        if module_of(path) in ("tiles", "ring"):
            assert not imports_of(path) & ({"tiles", "ring"} - {module_of(path)}), path


def test_every_module_has_a_layer() -> None:
    assert {module_of(path) for path in FILES} == set(LEVEL)


def test_import_needs_torch_alone() -> None:
    """With every other third-party package hidden that torch itself does not need, the import still works."""
    code = """
import sys
hidden = {"numpy", "rich", "typer", "triton", "transformers", "matplotlib", "hypothesis", "pytest", "tqdm"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(name)
import torch
loaded = {name for name in sys.modules}
sys.meta_path.insert(0, Hide())
import burst_attention, burst_attention.cli
new = {name.split(".")[0] for name in sys.modules if name not in loaded}
print(sorted(new & hidden), torch.distributed.is_initialized())
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[] False"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 420, f"{path.name} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert size <= 60, f"{path.name}: {node.name} has {size} lines"


def test_tests_that_fork_ranks_import_nothing_heavy() -> None:
    """A rank is forked from the process that collected the tests, and a large one is several times slower to fork."""
    folders = [Path(__file__).parents[1] / name for name in ("ring", "hosts", "gpu")]
    modules = sorted(f"tests.{path.parent.name}.{path.stem}" for folder in folders for path in folder.glob("*.py"))
    # Where there is no triton, what is written in it is not imported either.
    modules = [name for name in modules if importlib.util.find_spec("triton") or name != "tests.gpu.empty_groups"]
    asked = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\nprint(*sys.modules)"
    skip = "import pytest\npytest.skip = lambda *_, **__: None\n"
    found = subprocess.run(
        [sys.executable, "-c", skip + asked], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    heavy = {"transformers", "torch._dynamo", "torch._inductor", "deepspeed"} & set(found.stdout.split())
    assert not heavy, f"{sorted(heavy)} imported by collecting them"
