"""The package from outside: quick to import, its public names, its metadata."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zoomkv

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_import_is_light():
    heavy = run("import sys, zoomkv; print(*{m.partition('.')[0] for m in sys.modules})").split()
    allowed = {"zoomkv", "__main__", "__mp_main__", *sys.stdlib_module_names}
    new = set(heavy) - allowed - set(run("import sys; print(*sys.modules)").split())
    assert not new


def test_public_names():
    assert zoomkv.__all__ == ["Generator", "attach", "load", "make_cache"]
    for name in zoomkv.__all__:
        assert callable(getattr(zoomkv, name))
        assert name in dir(zoomkv)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zoomkv' has no attribute 'nothing'"):
        zoomkv.nothing  # noqa: B018


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert zoomkv.__version__ == project["version"] == importlib.metadata.version("zoomkv")


def test_everything_is_shipped():
    assert (ROOT / "src/zoomkv/py.typed").exists()
    folders = {file.parent for file in (ROOT / "src").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_constraints_can_be_served_by_an_index():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(pin.count("==") == 1 and "+" not in pin and "/" not in pin for pin in pins)
    assert "torch==2.13.0" in pins
