"""The artifact: a small folder with all that inference needs besides the base model.

::

    NAME/zoomkv.json    what it is: method, base and its fingerprint, policy, delimiters, figures
    NAME/adapter/       PEFT adapter with the delimiters' embedding rows (safetensors), or
    NAME/router.safetensors    a router of ``sekv``
    NAME/README.md      a model card
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import nn

from zoomkv.backbone.adapter import ADAPTER_FILES
from zoomkv.modules.router import Router
from zoomkv.modules.sketch import Sketch

FORMAT = 1
MANIFEST = "zoomkv.json"
ADAPTER = "adapter"
ROUTER = "router.safetensors"


@dataclass(frozen=True)
class Artifact:
    """What ``zoomkv.json`` says."""

    method: str
    """The policy that it was trained for."""
    base: str
    """Hub id, folder, GGUF file or ``smollm2-135m``."""
    fingerprint: dict[str, str | None]
    """Of the base that it was trained on."""
    delimiters: dict[str, int]
    """The summary tokens and their ids, the opening one first; none if it has no adapter."""
    router: dict[str, Any] = field(default_factory=dict)
    """The form of a router, its shape, and what it was trained with; empty if it has none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the policy, where they differ from its defaults."""
    training: dict[str, Any] = field(default_factory=dict)
    """How it was trained."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What was measured."""
    format: int = FORMAT
    """Version of this layout."""


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder with a ``zoomkv.json``."""
    return (Path(path) / MANIFEST).is_file()


def read_artifact(folder: str | os.PathLike[str]) -> Artifact:
    """The manifest of an artifact.

    Raises:
        ValueError: The folder is missing, incomplete, broken, or of a newer format.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"checkpoint {folder}: there is no {MANIFEST} in it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {path}: can't be read ({error}); export it again") from error
    version = fields.get("format") if isinstance(fields, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"checkpoint {path}: format {version}, this version reads {FORMAT}; "
            "upgrade zoomkv, or export it again"
        )
    try:
        artifact = Artifact(**fields)
    except TypeError as error:
        raise ValueError(f"checkpoint {path}: {error}; export it again") from error
    _check_kinds(artifact, path)
    files = [f"{ADAPTER}/{name}" for name in ADAPTER_FILES] if artifact.delimiters else []
    for name in [*files, *([ROUTER] if artifact.router else [])]:
        if not (folder / name).is_file():
            raise ValueError(f"checkpoint {folder}: {name} is missing; export it again")
    return artifact


def _check_kinds(artifact: Artifact, path: Path) -> None:
    like = Artifact(method="", base="", fingerprint={}, delimiters={})
    for name, example in asdict(like).items():
        value, required = getattr(artifact, name), name == "fingerprint"
        required |= name == "delimiters" and not artifact.router
        if not isinstance(value, type(example)) or (required and not value):
            raise ValueError(f"checkpoint {path}: bad '{name}' ({value!r}); export it again")


def read_router(folder: str | os.PathLike[str], artifact: Artifact) -> nn.Module:
    """The router of an artifact that has one.

    Raises:
        ValueError: Weights that can't be read or don't fit what the manifest says.
    """
    path = Path(folder) / ROUTER
    fields = dict(artifact.router)
    form = fields.pop("form", None)
    if form not in ROUTERS:
        raise ValueError(f"checkpoint {folder}: unknown form of router '{form}'; upgrade zoomkv")
    told = {name: fields.pop(name) for name in TRAINED_WITH if name in fields}
    try:
        router = ROUTERS[form](**fields)
        if isinstance(router, Router):
            _check_told(told)
            router.trained_with = told
        router.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"checkpoint {path}: no such router ({reason}); export it again") from None
    return router.eval().requires_grad_(False)


def save_router(router: nn.Module, folder: Path) -> None:
    """Writes a router's weights into an artifact's folder."""
    weights = {name: value.float().contiguous() for name, value in router.state_dict().items()}
    safetensors.torch.save_file(weights, folder / ROUTER)


ROUTERS: dict[str, type[Sketch] | type[Router]] = {"sketch": Sketch, "paper": Router}
"""Forms of routers."""

TRAINED_WITH = ("splitter", "memory")
"""What a router of the form ``paper`` says of its training, besides its shape."""


def _check_told(told: dict[str, Any]) -> None:
    """A router without its splitter would be used with any."""
    for name in TRAINED_WITH:
        if not isinstance(told.get(name), dict):
            raise TypeError(f"it does not say its {name}")
    if "scheme" not in told["splitter"]:
        raise TypeError("its splitter has no scheme")


def write_artifact(
    folder: str | os.PathLike[str], artifact: Artifact, save_weights: Callable[[Path], None]
) -> None:
    """Writes an artifact whole or not at all; one that stood there before is replaced.

    Args:
        folder: The artifact's folder.
        artifact: Its manifest.
        save_weights: Writes adapter or router into the artifact's folder, which it is given.

    Raises:
        OSError: The disk is full or not writable; what stood there before is intact.
        ValueError: The folder exists and is no artifact.
    """
    target = Path(folder)
    if target.exists() and not is_artifact(target) and any(target.iterdir()):
        raise ValueError(f"{target}: exists and is no checkpoint of ours; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        whole = scratch / "new"
        whole.mkdir()
        save_weights(whole)
        (whole / MANIFEST).write_text(
            json.dumps(asdict(artifact), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (whole / "README.md").write_text(_card(target.name, artifact), encoding="utf-8")
        if is_artifact(target):
            target.rename(scratch / "old")
        try:
            whole.rename(target)
        except OSError:
            if (scratch / "old").exists():
                (scratch / "old").rename(target)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _card(name: str, artifact: Artifact) -> str:
    def table(title: str, values: dict[str, Any]) -> list[str]:
        if not values:
            return []
        rows = [f"| {key} | {_shown(value)} |" for key, value in values.items()]
        return ["", f"## {title}", "", "| | |", "|---|---|", *rows]

    what = "A LoRA adapter and two embedding rows"
    if artifact.router:
        what = f"A router ({artifact.router['form']})"
    lines = [
        f"# {name}",
        "",
        f"{what} for `{artifact.base}`, exported by ZoomKV for the `{artifact.method}` policy. It "
        "holds no base weights.",
        "",
        "```python",
        "import zoomkv",
        "",
        f'model, tokenizer = zoomkv.load("checkpoints/{name}")',
        "```",
        *table("Training", artifact.training),
        *table("Figures", artifact.figures),
    ]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
