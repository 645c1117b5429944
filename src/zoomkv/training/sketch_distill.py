"""Distilling what a frozen model looks at into a sketch of its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import Precision, load_base, load_tokenizer
from zoomkv.backbone.teacher import Context, continue_with, read_context
from zoomkv.losses.attention import candidate_loss, captured
from zoomkv.modules.sketch import Projections, Sketch, estimate, fit_whitened
from zoomkv.ops.attention import grouped_attention
from zoomkv.spans.surprisal import SINKS
from zoomkv.training.partial_module import OptimizerOptions, PartialModule

_KEPT = {
    "query_turn",
    "key_turn",
    "query_whitening",
    "key_whitening",
    "sketch.query",
    "sketch.key",
}


class SketchDistill(PartialModule):
    """Trains a ``Sketch`` to rank the tokens of a context as the frozen model's attention does.

    The context is read first and knows nothing of what follows. The supervised rows of the
    continuation then look at all of it; for each layer and query head, the sketch's softmax over
    the tokens that could be fetched learns from the attention on them (cross-entropy, weighted by
    how much of the head's attention they have). Keys are rounded to their levels as they will be.

    Before the first step the maps are set to what is optimal for the second moments of the keys and
    queries of ``calibration`` batches (``modules.sketch.fit``). What is learnt are turns of
    whitened queries and keys; checkpoints also hold the maps that they come to.

    Logged: ``train/loss`` (nats), ``val/loss``, and ``val/captured``: the attention on the tokens
    that the sketch would fetch, as a share of what the best choice of as many would have.

    Args:
        base: Hub id, local folder, GGUF file or ``smollm2-135m``.
        precision: Of the frozen weights: fp32, bf16, nf4 or int8.
        width: Numbers that are kept of a key.
        window: Last tokens of a context that are read anyway, as its first four are.
        rows: Most rows of a continuation that are supervised in a step.
        fetched: Tokens that ``val/captured`` fetches.
        calibration: Batches that the maps start from.
        optimizer: The optimizer and its schedule.
        attention: The transformers attention implementation.
        seed: Decides which rows are supervised, together with the number of the batch.
    """

    def __init__(
        self,
        base: str = "smollm2-135m",
        precision: Precision = "bf16",
        width: int = 16,
        window: int = 16,
        rows: int = 64,
        fetched: int = 64,
        calibration: int = 8,
        optimizer: OptimizerOptions = OptimizerOptions(lr=5e-4, warmup=0.05),  # noqa: B008
        attention: str = "sdpa",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("rows", rows), ("fetched", fetched), ("calibration", calibration)):
            if value < 1:
                raise ValueError(f"model.{name}={value}: choose at least 1")
        optimizer = OptimizerOptions(**optimizer) if isinstance(optimizer, dict) else optimizer
        self.save_hyperparameters(
            {
                "base": base,
                "precision": precision,
                "width": width,
                "window": window,
                "rows": rows,
                "fetched": fetched,
                "calibration": calibration,
                "optimizer": asdict(optimizer),
                "attention": attention,
                "seed": seed,
            }
        )
        self.base, self.precision, self.attention = base, precision, attention
        self.width, self.window, self.rows, self.fetched = width, window, rows, fetched
        self.calibration, self.optimizer, self.seed = calibration, optimizer, seed
        self.tokenizer = load_tokenizer(base)
        self.kept = _KEPT
        self.val_loss, self.val_captured = MeanMetric(), MeanMetric()

    def configure_model(self) -> None:
        """Loads the frozen base and makes the sketch; every process does so once."""
        if self.model is not None:
            return
        device = self.trainer.strategy.root_device
        self.model, _ = load_base(self.base, self.precision, str(device), self.attention)
        self.model.requires_grad_(False).eval()
        self.fingerprint = fingerprint(self.model)
        config = self.model.config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        sketch = Sketch(
            config.num_hidden_layers, heads, config.num_key_value_heads, width, self.width
        )
        self.sketch = sketch.requires_grad_(False).to(device)
        whitening = torch.zeros(*sketch.key.shape[:3], width, device=device)  # [L, Hkv, D, D]
        self.register_buffer("query_whitening", whitening)
        self.register_buffer("key_whitening", whitening.clone())
        self.query_turn = torch.nn.Parameter(torch.zeros_like(sketch.query))
        self.key_turn = torch.nn.Parameter(torch.zeros_like(sketch.key))

    def on_fit_start(self) -> None:
        self.model.eval()
        if not self.key_turn.any():  # a resumed training has its maps
            self._start()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        losses: list[Tensor] = []

        def learn(layer: int, query: Tensor, context: Context, others: Tensor) -> None:
            arguments = (layer, query, context.keys[layer], self._candidates(context), others)
            losses.append(checkpoint(self._loss, *arguments, use_reentrant=False))

        self._look(batch, learn)
        loss = torch.stack(losses).mean()
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch["context"]))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Measures how much of the attention the fetched tokens would have."""

        def measure(layer: int, query: Tensor, context: Context, others: Tensor) -> None:
            keys, present = context.keys[layer], self._candidates(context)
            guess = estimate(self.maps(layer), query, keys, present)
            true = query @ keys.float()[:, :, None].mT
            self.val_loss.update(candidate_loss(guess, true, present, others))
            self.val_captured.update(captured(guess, true, present, others, self.fetched))

        self._look(batch, measure)

    def on_validation_epoch_end(self) -> None:
        for name, metric in (("loss", self.val_loss), ("captured", self.val_captured)):
            self.log(f"val/{name}", metric.compute(), prog_bar=True, sync_dist=False)
            metric.reset()

    def metadata(self) -> dict[str, Any]:
        """See ``PartialModule``."""
        return {"method": "sekv", "form": "sketch", "router": asdict(self.sketch.shape)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See ``PartialModule``: with the maps that the turns come to."""
        for layer in range(self.sketch.shape.layers):
            maps = self.maps(layer)
            self.sketch.query[layer].copy_(maps.query.detach().flatten(0, 1))
            self.sketch.key[layer].copy_(maps.key.detach())
        checkpoint["state_dict"] = self.state_dict()
        super().on_save_checkpoint(checkpoint)

    def maps(self, layer: int) -> Projections:
        """A layer's maps as they are now: query ``[Hkv, G, D, W]`` and key ``[Hkv, D, W]``."""
        whitening: Any = self.query_whitening, self.key_whitening
        queries, keys = (of_layers[layer] for of_layers in whitening)
        turn = self.query_turn[layer].unflatten(0, (len(queries), -1))
        return Projections(queries[:, None] @ turn, keys @ self.key_turn[layer])

    # -- within ---------------------------------------------------------------------------------

    def _look(self, batch: dict[str, Any], use: Any) -> None:
        """Calls ``use(layer, query, context, others)`` for each layer, with gradients enabled.

        ``query`` are the scaled queries of the supervised rows ``[B, Hkv, G, q, D]``, ``others``
        what they see besides the tokens that could be fetched: logits ``[B, Hkv, G, q, N]``.
        """
        context = read_context(self.model, batch["context"], surprisal_chunk=None)
        rows = self._supervised(batch["supervised"])  # [B, q]
        exists = ~self._candidates(context)  # and within the context's length
        longest = exists.shape[1]
        exists &= torch.arange(longest, device=exists.device) < context.length[:, None]
        learning = torch.is_grad_enabled()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            keys = torch.cat([context.keys[layer], key], 2)
            values = torch.cat([context.values[layer], value], 2)
            size, kv_heads = key.shape[2], key.shape[1]
            local = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
            there = torch.arange(longest, device=key.device) < context.length[:, None]
            mask = torch.cat(
                [there[:, None].expand(-1, size, -1), local.expand(len(there), -1, -1)], -1
            )
            with torch.set_grad_enabled(learning), torch.autocast(key.device.type, enabled=False):
                asked = rows[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
                wide = (query.gather(2, asked).float() * scaling).unflatten(1, (kv_heads, -1))
                seen = mask.gather(1, rows[..., None].expand(-1, -1, mask.shape[2])).clone()
                seen[..., :longest] &= exists[:, None]
                others = wide @ keys.float()[:, :, None].mT
                use(layer, wide, context, others.masked_fill(~seen[:, None, None], -torch.inf))
            return grouped_attention(query, keys, values, mask[:, None], scale=scaling)

        with torch.no_grad():
            continue_with(self.model, batch["continuation"], context.length, attend)

    def _loss(
        self, layer: int, query: Tensor, keys: Tensor, present: Tensor, others: Tensor
    ) -> Tensor:
        guess = estimate(self.maps(layer), query, keys, present)
        with torch.no_grad(), torch.autocast(keys.device.type, enabled=False):
            true = query @ keys.float()[:, :, None].mT
        return candidate_loss(guess, true, present, others)

    def _candidates(self, context: Context) -> Tensor:  # bool [B, T]
        """Tokens that could be fetched: neither the first nor in the window."""
        position = torch.arange(context.surprisal.shape[1], device=context.length.device)
        return (position >= SINKS) & (position < context.length[:, None] - self.window)

    def _supervised(self, supervised: Tensor) -> Tensor:  # bool [B, Q] -> [B, q]
        """As many rows of each text, drawn anew in each step; where one has fewer, some twice."""
        step = self.trainer.fit_loop.total_batch_idx if self.training else 0
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        order = torch.rand(supervised.shape, generator=generator).to(supervised.device)
        order = order.masked_fill(~supervised, -1).argsort(1, descending=True)
        count = supervised.sum(1).clamp(min=1)
        most = min(self.rows, int(count.max()))
        return order.gather(1, torch.arange(most, device=order.device) % count[:, None])

    @torch.no_grad()
    def _start(self) -> None:
        """The best maps for the moments of some batches."""
        shape = self.sketch.shape
        moments = torch.zeros(
            2, shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim, device=self.device
        )

        def add(layer: int, query: Tensor, context: Context, others: Tensor) -> None:
            keys, weight = context.keys[layer].float(), self._candidates(context)[:, None, :, None]
            mean = (keys * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)
            keys, query = (keys - mean) * weight, query.flatten(2, 3)
            moments[0, layer] += (keys.mT @ keys).sum(0)
            moments[1, layer] += (query.mT @ query).sum(0)

        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for number, batch in enumerate(data.train_dataloader()):
            if number == self.calibration:
                break
            self._look(
                {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()},
                add,
            )
        whitening, turn = fit_whitened(moments[0], moments[1], shape.width)
        self.query_whitening, self.key_whitening = whitening
        self.key_turn.copy_(turn.key)
        group = shape.heads // shape.kv_heads
        self.query_turn.copy_(turn.query.repeat_interleave(group, 1))
