"""Whether gates that learnt at short contexts open as much, and as rightly, at longer ones.

A router of the paper's form (SeKV, arXiv 2606.31145, section 3.3) is validated as in its training,
one text at a time. Each text is the same tokens behind their last 1K, 2K, 4K and 8K tokens, so that
only the length changes. Neither text was trained on: the book's last third, which has no more than
2K before 8 continuations, and Python's language reference, as ``pydoc`` brings it.

Two kinds of thresholds: as they were learnt, and set by ``--calibrate`` windows of the book's first
part, at the shortest length, so that each head opens as many spans there as it needs.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any

import torch
from _harness import Report, options, track
from lightning import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from zoomkv.backbone.fingerprint import describe_mismatch
from zoomkv.data.long_text import book
from zoomkv.export.artifact import read_artifact, read_router
from zoomkv.modules.router import Router
from zoomkv.training.router_distill import RouterDistill

_TOLD = ("opened", "auroc", "f1", "kl", "agreement")  # of what validation logs
_COLUMNS = {
    "opened": "opened",
    "needed": "needed",
    "auroc": "AUROC",
    "f1": "F1",
    "kl": "KL",
    "agreement": "same token",
}
_ROUTER = ("width", "rank", "threshold", "normalise")


@dataclass(frozen=True)
class Text:
    """A continuation, and all that stands before it."""

    before: list[int]
    continuation: list[int]

    def batch(self, length: int) -> dict[str, Any]:
        """Behind its last ``length`` tokens, as ``LongTextData`` has it."""
        continuation = torch.tensor([self.continuation])
        return {
            "context": torch.tensor([self.before[-length:]]),
            "continuation": continuation,
            "supervised": torch.ones_like(continuation, dtype=torch.bool),
            "id": ["text"],
        }


class Watched(RouterDistill):
    """Keeps what the gates said, and should have said, of the latest text."""

    logits: list[Tensor]
    """Of each layer, ``[H, n]``: supervised rows times spans."""
    needed: list[Tensor]
    """Likewise, bool."""

    def _outcome(self, batch: dict[str, Any]) -> Any:
        outcome = super()._outcome(batch)
        at = [outcome.valid.expand_as(lesson.logits)[0] for lesson in outcome.lessons]
        pairs = list(zip(outcome.lessons, at, strict=True))
        self.logits = [x.logits[0][on].view(len(on), -1).float() for x, on in pairs]
        self.needed = [x.needed[0][on].view(len(on), -1) for x, on in pairs]
        return outcome


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="checkpoints/sekv-paper-smollm2-135m")
    parser.add_argument("--precision", default="bf16", help="of the base")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--n", type=int, default=8, help="texts of each kind")
    parser.add_argument("--calibrate", type=int, default=4, help="windows that set thresholds")
    parser.add_argument("--continuation", type=int, default=96, help="tokens that are compared")
    parser.add_argument("--rows", type=int, default=64, help="of these, that look farthest")
    parser.add_argument("--quick", action="store_true", help="two short lengths, for tests")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.lengths, arguments.n, arguments.calibrate = [96, 160], 2, 2
        arguments.continuation, arguments.rows = 16, 8
    if min(arguments.n, arguments.calibrate, arguments.rows, *arguments.lengths) < 1:
        parser.error("--n, --calibrate, --rows and --lengths must be at least 1")
    arguments.lengths = sorted(set(arguments.lengths))
    report = Report(arguments, judged=False)
    _measure(arguments, report)
    report.finish()
    return 0


def _measure(arguments: Any, report: Report) -> None:
    warnings.filterwarnings("ignore", message=".*(treespec|many workers)")  # Lightning's own
    lengths = arguments.lengths
    module = _module(arguments)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    size, n = arguments.continuation, arguments.n
    kinds = {"as learnt": module.router.threshold_logit.detach().clone()}
    windows = texts([_ids(module, book("train"))], lengths[0], size, arguments.calibrate)
    kinds[f"set at {lengths[0]}"] = _set_by(trainer, module, windows, lengths[0])
    cells = []
    sources = {"book": [book("evaluation")], "reference": [topics[name] for name in sorted(topics)]}
    for name, documents in sources.items():
        ids = [_ids(module, document) for document in documents]
        # The lengths that leave room for as many continuations: all get the same ones.
        chosen = [length for length in lengths if len(texts(ids, length, size, n)) == n]
        cells += [(name, length, texts(ids, chosen[-1], size, n)) for length in chosen]
    rows = []
    for number in track(range(len(cells)), "lengths"):
        name, length, some = cells[number]
        for kind, thresholds in kinds.items():
            _set(module, thresholds)
            told = [_validated(trainer, module, text, length) for text in some]
            report.details[f"{name} {length} {kind}"] = told
            rows.append([name, length, len(some), kind, *_cells(told)])
    report.table(
        f"{arguments.checkpoint}, {arguments.rows} of {size} tokens behind each context, "
        "means over layers, heads and texts ± standard error over texts",
        ["text", "context", "n", "thresholds", *_COLUMNS.values()],
        rows,
    )


def _module(arguments: Any) -> Watched:
    """The router's training, with its weights; the base is loaded."""
    artifact = read_artifact(arguments.checkpoint)
    router = read_router(arguments.checkpoint, artifact)
    if not isinstance(router, Router):
        raise SystemExit(f"{arguments.checkpoint}: its router has no thresholds: name another")
    shape, told = asdict(router.shape), router.trained_with
    splitter = {name: value for name, value in told["splitter"].items() if name != "sinks"}
    module = Watched(
        artifact.base,
        arguments.precision,
        router={name: shape[name] for name in _ROUTER},
        splitter=splitter,
        memory=told["memory"],
        rows=arguments.rows,
        far_window=min(512, arguments.lengths[0] // 2),
    )
    module.configure_model()
    if difference := describe_mismatch(artifact.fingerprint, module.fingerprint):
        raise SystemExit(f"{arguments.checkpoint}: trained on another base: {difference}")
    module.router.load_state_dict(router.state_dict())
    return module


def _ids(module: Watched, text: str) -> list[int]:
    return module.tokenizer(text, add_special_tokens=False)["input_ids"]


def _set(module: Watched, thresholds: Tensor) -> None:  # logits [L, H]
    with torch.no_grad():
        module.router.threshold_logit.copy_(thresholds)


def _validated(trainer: Trainer, module: Watched, text: Text, length: int) -> dict[str, float]:
    """What validation logs of a text, and the share of spans that is needed."""
    loader = DataLoader([text.batch(length)], batch_size=None)
    [found] = trainer.validate(module, loader, verbose=False)
    told = {name: found.get(f"val/{name}", float("nan")) for name in _TOLD}
    return told | {"needed": float(torch.cat(module.needed).float().mean())}


def _set_by(trainer: Trainer, module: Watched, windows: Sequence[Text], length: int) -> Tensor:
    """Thresholds ``[L, H]`` at which as much opens in these windows as is needed."""
    # With everything open no query depends on what the layers below have closed.
    _set(module, torch.full_like(module.router.threshold_logit, -torch.inf))
    seen = []
    for text in windows:
        _validated(trainer, module, text, length)
        seen.append(list(zip(module.logits, module.needed, strict=True)))
    layers = [zip(*layer, strict=True) for layer in zip(*seen, strict=True)]
    return torch.stack(
        [even_thresholds(torch.cat(logits, 1), torch.cat(needed, 1)) for logits, needed in layers]
    )


def texts(documents: Sequence[list[int]], longest: int, size: int, n: int) -> list[Text]:
    """At most ``n`` continuations of ``size`` tokens, spread evenly over all that do not overlap.

    Each has at least ``longest`` tokens of its own document before it.
    """
    found = [
        Text(ids[at - longest : at], ids[at : at + size])
        for ids in documents
        for at in range(longest, len(ids) - size + 1, size)
    ]
    count = min(n, len(found))
    return [found[(2 * number + 1) * len(found) // (2 * count)] for number in range(count)]


def even_thresholds(logits: Tensor, needed: Tensor) -> Tensor:  # [H, n], bool [H, n] -> [H]
    """Halfway between the last gate that opens and the next, if each head opens as many as it
    needs."""
    ordered = logits.sort(-1, descending=True).values
    ordered = torch.cat([ordered[:, :1] + 2, ordered, ordered[:, -1:] - 2], -1)
    count = needed.sum(-1, keepdim=True)
    return (ordered.gather(-1, count) + ordered.gather(-1, count + 1))[:, 0] / 2


def _cells(told: Sequence[dict[str, float]]) -> list[str]:
    """Mean and standard error over the texts."""
    cells = []
    for name in _COLUMNS:
        values = [one[name] for one in told]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        cells.append(f"{mean(values):.3f} ± {error:.3f}")
    return cells


if __name__ == "__main__":
    raise SystemExit(main())
