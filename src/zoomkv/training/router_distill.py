"""Distilling a model's attention and words into SeKV's router (arXiv 2606.31145, section 3.3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import QUANTISED, Precision, load_base, load_tokenizer
from zoomkv.backbone.rotary import rotary_of
from zoomkv.backbone.teacher import Context, continue_with, far_rows, read_context, teach
from zoomkv.losses.cost import rank_cost, zoom_cost
from zoomkv.losses.distillation import distillation, first_token_agreement
from zoomkv.losses.spectrum import spectral_loss
from zoomkv.losses.zoom import coverage_target, zoom_bce
from zoomkv.modules.memory import Recovery, SpanMemory
from zoomkv.modules.router import Router, RouterShape
from zoomkv.modules.soft_reader import soft_read
from zoomkv.ops.lowrank import Method
from zoomkv.spans.surprisal import SINKS, Spans, fine_spans, paper_spans, span_weights
from zoomkv.training.checkpointing import trained_names
from zoomkv.training.partial_module import OptimizerOptions, PartialModule

_ROWS_OF_LOGITS = 256  # that exist at once, of student and teacher
# Gates crowd near 1, so the thresholds that AUROC is measured at are even in logits.
_AUROC_LOGITS = torch.linspace(-12, 12, 193)


@dataclass(frozen=True)
class SplitOptions:
    """How a context is cut into spans; a router works with the splitter that it was trained on."""

    scheme: Literal["paper", "fine"] = "paper"
    """``paper_spans`` or ``fine_spans``."""
    alpha: float = 1.0
    """``paper``: deviations above the mean at which a token is an anchor."""
    min_span: int = 16
    """Tokens of the shortest span."""
    max_span: int | None = 256
    """Tokens of the longest span; ``paper`` knows none without a limit."""
    anchor_share: float = 0.015
    """``fine``: share of tokens that are anchors."""

    def __post_init__(self) -> None:
        if self.scheme not in ("paper", "fine"):
            raise ValueError(f"splitter.scheme='{self.scheme}': choose paper or fine")
        self.cut(torch.zeros(1, 1), torch.ones(1, dtype=torch.int64))  # checks the bounds

    def cut(self, surprisal: Tensor, length: Tensor) -> Spans:
        """The spans of contexts, from nats ``[B, T]`` and tokens ``[B]``."""
        if self.scheme == "paper":
            return paper_spans(surprisal, length, self.alpha, self.min_span, self.max_span)
        if self.max_span is None:
            raise ValueError("splitter.max_span: fine spans need a limit; give one")
        return fine_spans(surprisal, length, self.min_span, self.max_span, self.anchor_share)


@dataclass(frozen=True)
class RouterOptions:
    """See ``Router``."""

    width: int = 32
    """Width of the space that queries and spans are compared in."""
    rank: int = 32
    """Most components of a span."""
    threshold: float = 0.05
    """Where the threshold of each head begins."""
    normalise: bool = True
    """Compare with summaries of unit length."""

    def __post_init__(self) -> None:
        RouterShape(layers=1, heads=1, kv_heads=1, head_dim=1, **asdict(self))  # checks the rest


@dataclass(frozen=True)
class MemoryOptions:
    """See ``SpanMemory.build``."""

    rho: float = 1.0
    """Share of the rows' storage that factors may take."""
    rope: Literal["post", "pre"] = "post"
    """Factorise keys after RoPE (the paper), or before it."""
    recovery: Recovery = "lowrank"
    """Read zoomed spans as rebuilt, or exactly as they were."""
    method: Method = "randomised"
    """How spans are factorised."""

    def __post_init__(self) -> None:
        for name, known in (
            ("rope", ("post", "pre")),
            ("recovery", get_args(Recovery)),
            ("method", get_args(Method)),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"memory.{name}='{value}': choose one of {', '.join(known)}")
        if not self.rho > 0:
            raise ValueError(f"memory.rho={self.rho}: give a share above 0")


@dataclass(frozen=True)
class LossOptions:
    """Weights of the four losses, which are all means, and what they are told."""

    zoom: float = 1.0
    """Of the gates' cross-entropy."""
    spectrum: float = 0.5
    """Of the energy that rank gates lose."""
    cost: float = 0.1
    """Of opened spans and retained rank, once annealing is over."""
    beta: float = 0.1
    """Of retained rank within the cost."""
    anneal: float = 0.5
    """Share of the steps in which the weight of the cost rises from 0."""
    rho: float = 0.9
    """Share of a query's attention that needed spans and exact tokens cover."""
    positive_weight: float = 10.0
    """What a needed span counts in the gates' cross-entropy."""
    temperature: float = 0.1
    """Width of the slope of the straight-through gradient."""

    def __post_init__(self) -> None:
        for name in ("zoom", "spectrum", "cost", "beta"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"loss.{name}={getattr(self, name)}: give a weight, 0 or more")
        for name in ("rho", "positive_weight", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"loss.{name}={getattr(self, name)}: give a number above 0")
        if self.rho > 1 or not 0 <= self.anneal <= 1:
            raise ValueError(f"loss.rho={self.rho}, loss.anneal={self.anneal}: give shares")


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What one layer's router said, and should have said, of the rows that count."""

    logits: Tensor  # [B, H, q, S]
    opens: Tensor  # [B, H, q, S]
    needed: Tensor  # bool [B, H, q, S]
    gates: Tensor | None  # [2, B, Hkv, S, R]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one batch."""

    lessons: list[_Lesson]
    memories: list[SpanMemory]
    valid: Tensor  # bool [B, 1, q, S], spans of rows that count
    divergence: Tensor  # nats [n] of those rows
    agreement: Tensor  # [n]


class RouterDistill(PartialModule):
    """Trains a ``Router`` so that a frozen model says behind spans what it says behind a context.

    The context is read once, cut into spans and put into a memory of each layer; the continuation
    never enters it. The teacher continues over the whole context. The student continues over the
    memory, opening spans as the router decides, and over the continuation itself, exactly and
    causally. Of the rows that count, the loss is

    - KL(teacher || student) of the next token,
    - cross-entropy of the gates against the smallest set of spans that, with the exact tokens,
      covers ``rho`` of the teacher's attention,
    - the energy that rank gates take away,
    - the shares of spans opened and of rank retained, whose weight rises linearly at first.

    The query that a gate looks at is a constant: layers below learn from what they read, not from
    how it moves the gates above.

    Logged: ``train/loss``, ``train/kl``, ``train/zoom``, ``train/spectrum``, ``train/cost``,
    ``train/opened`` and ``train/agreement``. Of validation texts, their rows chosen alike:
    ``val/kl``, ``val/agreement`` (same first token), ``val/auroc`` of gates and ``val/f1`` of
    decisions against what is needed, ``val/opened`` (share of spans), ``val/rank`` (sum of a span's
    gates) and ``val/error`` (Frobenius norm that rebuilt spans lack once negligible components are
    gone, over that of the rows).

    Args:
        base: Hub id, local folder, GGUF file or ``smollm2-135m``.
        precision: Of the frozen weights: fp32, bf16, nf4 or int8.
        router: The router.
        splitter: How contexts are cut.
        memory: How spans come back.
        loss: The losses.
        rows: Supervised rows of each text: those that look farthest. None: all that matter.
        far_window: Tokens farther than so many are far.
        optimizer: The optimizer and its schedule.
        attention: The transformers attention implementation that the base is loaded with.
        seed: Decides where the router begins.

    Raises:
        ValueError: Options out of range.
    """

    def __init__(
        self,
        base: str = "smollm2-135m",
        precision: Precision = "bf16",
        router: RouterOptions = RouterOptions(),  # noqa: B008 (frozen)
        splitter: SplitOptions = SplitOptions(),  # noqa: B008
        memory: MemoryOptions = MemoryOptions(),  # noqa: B008
        loss: LossOptions = LossOptions(),  # noqa: B008
        rows: int | None = 64,
        far_window: int = 512,
        optimizer: OptimizerOptions = OptimizerOptions(  # noqa: B008
            lr=1e-3, weight_decay=0.01, warmup=0.1
        ),
        attention: str = "sdpa",
        seed: int = 0,
    ) -> None:
        super().__init__()
        # Plain types, so that a checkpoint can be read with weights_only.
        self.router_options = _made(RouterOptions, router)
        self.splitter = _made(SplitOptions, splitter)
        self.memory = _made(MemoryOptions, memory)
        self.loss = _made(LossOptions, loss)
        self.optimizer = _made(OptimizerOptions, optimizer)
        self.save_hyperparameters(
            {
                "base": base,
                "precision": precision,
                "router": asdict(self.router_options),
                "splitter": asdict(self.splitter),
                "memory": asdict(self.memory),
                "loss": asdict(self.loss),
                "rows": rows,
                "far_window": far_window,
                "optimizer": asdict(self.optimizer),
                "attention": attention,
                "seed": seed,
            }
        )
        if rows is not None and rows < 1:
            raise ValueError(f"model.rows={rows}: give at least 1, or none for all")
        self.base, self.precision, self.attention = base, precision, attention
        self.rows, self.far_window, self.seed = rows, far_window, seed
        self.tokenizer = load_tokenizer(base)
        self.router: Any = None
        self._shape: dict[str, Any] = {}
        self.measured = torch.nn.ModuleDict(
            {name: MeanMetric() for name in ("kl", "agreement", "opened", "rank", "error")}
            | {"auroc": BinaryAUROC(thresholds=_AUROC_LOGITS.sigmoid()), "f1": BinaryF1Score()}
        )

    def configure_model(self) -> None:
        """Loads the base, freezes it and makes the router; every process does so once."""
        if self.model is not None:
            return
        self.model, _ = load_base(self.base, self.precision, self._base_device(), self.attention)
        self.model.requires_grad_(False).eval()
        self.fingerprint = fingerprint(self.model)
        config = self.model.config
        heads = config.num_attention_heads
        with torch.device("cpu"):  # where the generator is
            self.router = Router(
                config.num_hidden_layers,
                heads,
                config.num_key_value_heads or heads,
                getattr(config, "head_dim", None) or config.hidden_size // heads,
                generator=torch.Generator().manual_seed(self.seed),
                **asdict(self.router_options),
            )
        self._shape = asdict(self.router.shape)
        # Now, since a strategy may wrap modules later and change the names.
        self.kept = trained_names(self)

    def on_fit_start(self) -> None:
        self.model.eval()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        outcome = self._outcome(batch)
        losses = self._losses(outcome)
        told = {name: value.detach() for name, value in losses.items()}
        told["opened"] = _mean([zoom_cost(one.opens, outcome.valid) for one in outcome.lessons])
        if len(outcome.agreement):
            told["agreement"] = outcome.agreement.mean()
        loss = (
            losses["kl"]
            + self.loss.zoom * losses["zoom"]
            + self.loss.spectrum * losses["spectrum"]
            + self._cost_weight() * losses["cost"]
        )
        # Every parameter has a gradient, also where a context has no span.
        loss = loss + 0 * sum(value.sum() for value in self.router.parameters())
        told["loss"] = loss.detach()
        for name, value in told.items():
            shown = name in ("loss", "kl", "opened")
            size = len(batch["context"])
            self.log(f"train/{name}", value.detach(), prog_bar=shown, batch_size=size)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Measures how well the router tells what is needed, and what its mistakes do."""
        outcome = self._outcome(batch)
        measured: Any = self.measured
        count = len(outcome.divergence)
        if count:
            measured["kl"].update(outcome.divergence.mean(), weight=count)
            measured["agreement"].update(outcome.agreement.mean(), weight=count)
        real = outcome.memories[0].spans.size > 0
        if not real.any():
            return
        for lesson, memory in zip(outcome.lessons, outcome.memories, strict=True):
            valid = outcome.valid.expand_as(lesson.logits)
            opened, needed = lesson.opens[valid], lesson.needed[valid].long()
            if len(needed):
                measured["opened"].update(opened.mean(), weight=len(needed))
                measured["auroc"].update(lesson.logits[valid].sigmoid(), needed)
                measured["f1"].update(opened, needed)
            if lesson.gates is not None:
                stored = memory.deploy(lesson.gates, dtype=torch.float32)
                for name, value in ("rank", lesson.gates.sum(-1)), ("error", stored.error):
                    value = value[real[:, None].expand_as(value)]
                    measured[name].update(value.mean(), weight=len(value))

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.measured.items():
            assert isinstance(metric, Metric)
            # Computed by every process, whatever it has seen itself: this is where they meet.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The ``compute`` method")
                value = metric.compute()
            metric.reset()
            if not value.isnan() and not self.trainer.sanity_checking:
                self.log(f"val/{name}", value, prog_bar=name == "kl", sync_dist=False)

    def metadata(self) -> dict[str, Any]:
        """See ``PartialModule``."""
        return {
            "method": "sekv",
            "form": "paper",
            "router": self._shape,
            "splitter": self._splits(),
            "memory": asdict(self.memory),
        }

    def check_metadata(self, told: dict[str, Any]) -> None:
        """See ``PartialModule``: router and splitter must be the same."""
        for what, ours in (("router", self._shape), ("splitter", self._splits())):
            for name, value in ours.items():
                if (theirs := told[what].get(name)) != value:
                    raise ValueError(
                        f"checkpoint: made with {what}.{name}={theirs}, here it is {value}"
                    )

    # -- within ---------------------------------------------------------------------------------

    def _outcome(self, batch: dict[str, Any]) -> _Outcome:
        """Teacher and student behind the same contexts."""
        continuation, supervised = batch["continuation"], batch["supervised"]
        context = read_context(self.model, batch["context"])
        spans = self.splitter.cut(context.surprisal, context.length)
        memories = self._memories(context, spans)
        window = None if self.rows is None else self.far_window
        teaching = teach(self.model, context, spans, continuation, far_window=window)
        rows, counts = self._supervised(supervised, teaching.far)
        needed = [
            coverage_target(_at(mass, rows), self.loss.rho, outside=_at(outside, rows))
            for mass, outside in zip(teaching.span_mass, teaching.outside, strict=True)
        ]
        said = _at(teaching.hidden[:, None], rows)[:, 0]
        del teaching  # with the masses of all layers

        student = _Student(self.router, memories, rows, needed, self.loss.temperature)
        hidden = continue_with(self.model, continuation, context.length, student)
        hidden = _at(hidden[:, None], rows)[:, 0]
        divergence, agreement = self._compared(hidden[counts], said[counts])
        return _Outcome(
            lessons=[student.lessons[layer] for layer in range(len(memories))],
            memories=memories,
            valid=counts[:, None, :, None] & (spans.size > 0)[:, None, None],
            divergence=divergence,
            agreement=agreement,
        )

    @torch.no_grad()
    def _memories(self, context: Context, spans: Spans) -> list[SpanMemory]:
        weights = span_weights(context.surprisal, spans)
        return [
            SpanMemory.build(
                keys,
                values,
                spans,
                weights,
                rank=self.router_options.rank,
                rho=self.memory.rho,
                recovery=self.memory.recovery,
                rotary=rotary_of(self.model) if self.memory.rope == "pre" else None,
                method=self.memory.method,
            )
            for keys, values in zip(context.keys, context.values, strict=True)
        ]

    def _supervised(self, supervised: Tensor, far: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows to learn from ``[B, q]``, and which of them count: some texts have fewer."""
        score = torch.zeros(supervised.shape, device=supervised.device) if far is None else far
        most = int(supervised.sum(1).max())
        count = max(1, most if self.rows is None else min(self.rows, most))
        rows = far_rows(score.masked_fill(~supervised, -1), count)
        return rows, supervised.gather(1, rows)

    def _compared(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence and agreement of next tokens, from states ``[n, hidden]``."""
        head = self.model.get_output_embeddings()

        def part(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
            # Under autocast the head would be copied and its logits rounded to bf16.
            with torch.autocast(ours.device.type, enabled=False):
                logits = head(ours)
                with torch.no_grad():
                    wanted = head(theirs)
                return distillation(logits, wanted), first_token_agreement(logits, wanted)

        if len(student) <= _ROWS_OF_LOGITS:
            return part(student, teacher)
        pieces = zip(student.split(_ROWS_OF_LOGITS), teacher.split(_ROWS_OF_LOGITS), strict=True)
        done = [recomputed(part, *piece, use_reentrant=False) for piece in pieces]
        divergence, agreement = zip(*done, strict=True)
        return torch.cat(divergence), torch.cat(agreement)

    def _losses(self, outcome: _Outcome) -> dict[str, Tensor]:
        loss, lessons, valid = self.loss, outcome.lessons, outcome.valid
        spectrum, rank = [], []
        for lesson, memory in zip(lessons, outcome.memories, strict=True):
            if lesson.gates is not None and memory.factors is not None:
                sigma = memory.factors.sigma
                spectrum.append(spectral_loss(lesson.gates, sigma))
                rank.append(rank_cost(lesson.gates, sigma > 0))
        return {
            "kl": outcome.divergence.sum() / max(1, len(outcome.divergence)),
            "zoom": _mean(
                [zoom_bce(x.logits, x.needed, valid, loss.positive_weight) for x in lessons]
            ),
            "spectrum": _mean(spectrum),
            "cost": _mean([zoom_cost(x.opens, valid) for x in lessons]) + loss.beta * _mean(rank),
        }

    def _cost_weight(self) -> float:
        rising = self.loss.anneal * self.trainer.estimated_stepping_batches
        done = self.trainer.global_step
        return self.loss.cost * (done / rising if done < rising else 1.0)

    def _splits(self) -> dict[str, Any]:
        return {**asdict(self.splitter), "sinks": SINKS}

    def _base_device(self) -> str:
        # A quantised base is placed once, on its process's own device; it can't be moved later.
        device = self.trainer.strategy.root_device if self._trainer is not None else "cpu"
        return str(device) if self.precision in QUANTISED else "cpu"


class _Student:
    """Reads memories through a router, and keeps what each layer can learn from it."""

    def __init__(
        self,
        router: Router,
        memories: list[SpanMemory],
        rows: Tensor,  # [B, q]
        needed: list[Tensor],  # bool [B, H, q, S]
        temperature: float,
    ) -> None:
        self._router, self._memories, self._temperature = router, memories, temperature
        self._rows, self._needed = rows, needed
        self.lessons: dict[int, _Lesson] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        router, memory = self._router, self._memories[layer]
        gates = None if memory.factors is None else memory.gates(router.rank_gate)
        summaries = router.summaries(layer, memory.coarse_keys)
        logits = router.logits(layer, query.detach(), summaries, memory.spans.size)
        opens = router.opens(layer, logits, self._temperature)
        self.lessons[layer] = _Lesson(
            _at(logits, self._rows), _at(opens, self._rows), self._needed[layer], gates
        )
        coarse = memory.coarse_keys, memory.coarse_values
        return soft_read(
            query, memory.rows(gates), coarse, (key, value), memory.spans, opens, scaling
        )


def _made(kind: Callable[..., Any], options: Any) -> Any:
    return kind(**options) if isinstance(options, dict) else options


def _at(x: Tensor, rows: Tensor) -> Tensor:  # [B, H, Q, ...], [B, q] -> [B, H, q, ...]
    index = rows.view(len(rows), 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand(len(x), x.shape[1], -1, *x.shape[3:]))


def _mean(values: list[Tensor]) -> Tensor:
    """Over layers; 0 of none."""
    return torch.stack(values).mean() if values else torch.zeros(())
