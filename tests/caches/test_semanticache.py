"""SemantiCache: attention over merged rows, what is merged and what never is."""

from typing import Any

import pytest
import torch
from torch import Tensor

import zoomkv
from zoomkv.caches.registry import make_cache
from zoomkv.ops.attention_reference import attention_reference

OPTIONS = {"budget": 30, "n_sink": 2, "recent": 4}


@pytest.fixture
def model(tiny_llama: Any, tools: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model, tools.TOKENIZER)
    return model


def attention_outputs(model: Any) -> list[Tensor]:
    """What each attention module hands to its output projection, layer by layer."""
    seen: list[Tensor] = []
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].clone())
        )
    return seen


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_equals_the_reference_with_logarithms_of_sizes(
    tiny_llama: Any, tools: Any, implementation: str
) -> None:
    """Two turns of two rows, one with pads; queries of one token and of a prompt."""
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    zoomkv.attach(model, tools.TOKENIZER)
    cache = make_cache("semanticache", model, **OPTIONS)
    outputs, read = attention_outputs(model), []
    update = cache.update

    def spy_update(k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        before = cache.layers[layer].slots.count.clone()
        keys, values = update(k, v, layer, *rest, **named)
        sizes = cache.layers[layer].log_size
        read.append((before, keys.clone(), values.clone(), sizes))
        return keys, values

    queries: list[Tensor] = []

    def spy_watch(step: Any, layer: int, query: Tensor, key: Tensor) -> None:
        queries.append(query.clone())

    cache.update, cache.watch = spy_update, spy_watch
    prompt, second = tools.prompt_ids(2, 40), tools.prompt_ids(2, 9, seed=4)
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    tools.run(model, cache, prompt, tools.scripted_ids(2, 30), mask)
    tools.run(model, cache, second, tools.scripted_ids(2, 12, seed=8))

    merged = 0
    for (before, keys, values, sizes), query, out in zip(read, queries, outputs, strict=True):
        size, length = query.shape[2], keys.shape[2]
        for row in range(2):
            pads = 6 if row and size == 40 else 0
            count = int(before[row]) + torch.arange(1, size - pads + 1)
            readable = torch.arange(length) < count[:, None]
            if size == 40 and not row:
                assert length == 40
            bias = torch.zeros(1, keys.shape[1], 1, length)
            if sizes is not None:
                bias[0, :, 0, : sizes.shape[2]] = sizes[row]
                merged += int((sizes[row] > 0).sum())
            want = attention_reference(
                query[row : row + 1, :, pads:],
                keys[row : row + 1],
                values[row : row + 1],
                readable[None, None],
                bias,
            )
            got = out[row, pads:].unflatten(-1, (4, -1)).transpose(0, 1)
            torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-5)
    assert merged > 1000
    assert max(float(s.max()) for *_, s in read if s is not None) > 1  # clusters of 3 and more


class Members:
    """Who has been merged into whom, followed from outside."""

    def __init__(self, cache: Any) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in cache.layers]
        self.values: list[list[Tensor]] = [[] for _ in cache.layers]
        # By layer, batch row and head: the positions that each stored row stands for.
        self.of: list[list[list[list[list[int]]]]] = []
        self.cache = cache
        update = cache.update

        def spy_update(k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
            self.keys[layer].append(k.clone())
            self.values[layer].append(v.clone())
            if len(self.of) <= layer:
                self.of.append([[[] for _ in range(k.shape[1])] for _ in range(len(k))])
            start = sum(part.shape[2] for part in self.keys[layer][:-1])
            for heads in self.of[layer]:
                for rows in heads:
                    rows.extend([start + i] for i in range(k.shape[2]))
            return update(k, v, layer, *rest, **named)

        cache.update = spy_update
        for layer in cache.layers:

            def spy_merge(into: Tensor, count: Tensor, layer: Any = layer) -> None:
                for row, heads in enumerate(self.of[layer.number]):
                    for head, rows in enumerate(heads):
                        joined: dict[int, list[int]] = {}
                        for slot, seed in enumerate(into[row, head, : len(rows)].tolist()):
                            joined.setdefault(seed, []).extend(rows[slot])
                        heads[head] = list(joined.values())
                        assert len(joined) == int(count[row])
                type(layer).merge(layer, into, count)

            layer.merge = spy_merge

    def check(self, layer: int) -> list[list[int]]:
        """Every stored row is the mean of its members; returns all clusters."""
        stored, clusters = self.cache.layers[layer].stored(), []
        sizes = self.cache.layers[layer].log_size
        for row, heads in enumerate(self.of[layer]):
            for head, rows in enumerate(heads):
                assert len(rows) == int(self.cache.layers[layer].slots.count[row])
                firsts = self.cache.layers[layer].slots.positions[row, head, : len(rows)]
                assert firsts.tolist() == [members[0] for members in rows]
                for parts, tensor in zip((self.keys, self.values), stored, strict=True):
                    every = torch.cat(parts[layer], 2)[row, head]
                    want = torch.stack([every[members].mean(0) for members in rows])
                    torch.testing.assert_close(
                        tensor[row, head, : len(rows)], want, atol=1e-5, rtol=1e-5
                    )
                for number, members in enumerate(rows):
                    log = float(sizes[row, head, number]) if number < sizes.shape[2] else 0.0
                    assert round(float(torch.tensor(log).exp())) == len(members)
                clusters += rows
        return clusters


def test_rows_are_means_of_their_members_within_clauses(model: Any, tools: Any) -> None:
    """Merged again and again, a row is still the plain mean of all tokens that it stands for."""
    prompt, generated = tools.prompt_ids(2, 36), tools.prompt_ids(2, 40, seed=6)
    ids = torch.cat([prompt, generated], 1)
    ids[ids % 20 == tools.DOT] += 1
    ids[:, 7::12] = tools.DOT
    cache = make_cache("semanticache", model, **OPTIONS)
    members = Members(cache)
    tools.run(model, cache, ids[:, :36], ids[:, 36:])
    sizes = set()
    for layer in range(2):
        clusters = members.check(layer)
        assert sorted(p for members in clusters for p in members) == sorted([*range(76)] * 4)
        for cluster in clusters:
            sizes.add(len(cluster))
            stops = [p for p in range(min(cluster), max(cluster) + 1) if p % 12 == 7]
            assert not stops or len(cluster) == 1
            if len(cluster) > 1:
                assert min(cluster) == cluster[0] >= OPTIONS["n_sink"]
                assert max(cluster) < 76 - OPTIONS["recent"]
    assert {1, 2, 3, 4} < sizes
    assert cache.footprint().rows_max <= 30


def test_beyond_the_clauses_merging_goes_on(model: Any, tools: Any) -> None:
    """Every other token is a delimiter, and there are more of them than the budget holds."""
    ids = tools.prompt_ids(1, 90)
    ids[ids % 20 == tools.DOT] += 1
    ids[:, ::2] = tools.DOT
    cache = make_cache("semanticache", model, budget=20, n_sink=2, recent=4, reach=3)
    members = Members(cache)
    _, reads = tools.run(model, cache, ids[:, :60], ids[:, 60:])
    for layer in range(2):
        clusters = members.check(layer)
        assert sorted(p for members in clusters for p in members) == sorted([*range(90)] * 2)
    assert cache.footprint().rows_max <= 20
    for read in reads:
        for layer in read:
            assert layer[0, :, :2].all()  # sinks keep their places


def test_rows_with_like_keys_are_exact(model: Any, tools: Any) -> None:
    """With one key for each clause, weights of merged rows are what they were before."""
    torch.manual_seed(0)
    clause_keys = torch.randn(12, 2, 8)
    ids = tools.prompt_ids(1, 70)
    ids[ids % 20 == tools.DOT] += 1
    ids[:, 6::9] = tools.DOT
    clause = (torch.arange(70) + 2) // 9  # a delimiter's key is not compared
    caches = [make_cache("full", model), make_cache("semanticache", model, **OPTIONS)]
    results = []
    for cache in caches:
        update = cache.update

        def like(k: Tensor, v: Tensor, *rest: Any, cache: Any = cache, update: Any = update) -> Any:
            at = cache.seen + torch.arange(k.shape[2])
            return update(clause_keys[clause[at]].transpose(0, 1)[None].contiguous(), v, *rest)

        cache.update = lambda k, v, *rest, like=like, **named: like(k, v, *rest)
        results.append(tools.run(model, cache, ids[:, :40], ids[:, 40:])[0])
    assert caches[1].footprint().rows_max <= 30
    assert caches[1].evicted > 30
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def test_without_sizes_merged_rows_would_weigh_too_little(model: Any, tools: Any) -> None:
    """The comparison above can tell: the addend matters."""
    prompt, generated = tools.prompt_ids(1, 40), tools.scripted_ids(1, 20)
    cache = make_cache("semanticache", model, **OPTIONS)
    plain, _ = tools.run(model, cache, prompt, generated)
    cache = make_cache("semanticache", model, **OPTIONS)
    cache.expect_prompt(40)
    with torch.no_grad():
        model(prompt, cache=cache)
        for layer in cache.layers:
            layer.log_size.zero_()
        other = model(generated[:, :1], cache=cache).logits[:, -1]
    assert float((other - plain[:, 1]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 42}, "budget=42: this policy needs at least 43 rows"),
        ({"budget": 0.0}, "budget=0.0: a share"),
        ({"n_sink": -1}, "n_sink=-1"),
        ({"recent": -1}, "recent=-1"),
        ({"reach": 0}, "reach=0"),
        ({"refill": 1.0}, "refill=1.0: give the share"),
        ({"refill": 1}, "refill=1: give the share"),
    ],
)
def test_options_out_of_range(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache("semanticache", model, **options)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_budget_works(
    tiny_llama: Any, tools: Any, kv_heads: int, dtype: torch.dtype
) -> None:
    model = tiny_llama(kv_heads=kv_heads).to(dtype)
    zoomkv.attach(model, tools.TOKENIZER)
    row = 2 * 8 * dtype.itemsize
    index = 4 + (4 if kv_heads > 1 else 0)  # a size, and a position where heads differ
    enough = -(-8 * (row + index) // row)
    with pytest.raises(ValueError, match=f"needs at least {enough} rows"):
        make_cache("semanticache", model, budget=enough - 1, n_sink=2, recent=4)
    cache = make_cache("semanticache", model, budget=enough, n_sink=2, recent=4)
    logits, _ = tools.run(model, cache, tools.prompt_ids(1, 30), tools.scripted_ids(1, 30))
    assert logits.isfinite().all()
    assert cache.footprint().rows_max <= 8


def test_it_needs_a_tokenizer(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_cache("semanticache", model)
