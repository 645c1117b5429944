"""The numbers of each figure of an inspection, as plain JSON values.

They follow figures 1a, 1b, 2, 3, 4a, 4b and 6a of BeaconKV (arXiv 2609.04971). ``figures`` draws
from these alone, so what stands in a file is what its picture shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoomkv.evaluation.attention_map import GLOBAL, KIND_NAMES, LOCAL, MISSING, attention_rows
from zoomkv.evaluation.inspection import Inspection
from zoomkv.evaluation.query_geometry import OBSERVED, cosine_similarity, principal_plane

Numbers = dict[str, Any]

_COLUMNS = 512  # of the attention map; beyond, neighbouring keys share one
_HEADS = 6  # whose distance histograms are shown
_PAIRS = 2  # of a global query and its local neighbour


def figure_numbers(found: Inspection, texts: Sequence[str]) -> tuple[dict[str, Numbers], list[str]]:
    """The numbers of every figure that can be drawn, by its file's stem.

    Args:
        found: What ``inspect_tokens`` gives.
        texts: Text of each token.

    Returns:
        The figures, and a sentence for each thing that is missing or of little use.
    """
    notes = []
    if not found.text_counts.any():
        notes.append(
            f"no query of the text is global: none has its median distance above "
            f"{found.rules.window} tokens and {found.rules.fraction:g} of its position"
        )
    elif not found.counts.any():
        notes.append("no query of the interval is global; some of the text before it are")
    figures = {
        "1a_attention_map": _attention_map(found, texts),
        "1b_distances": _distances(found),
        "3_global_queries": _global_queries(found, texts),
        "4a_similarity": _similarity(found),
        "4b_plane": _plane(found),
    }
    top = _top_keys(found, texts)
    if top["queries"]:
        figures["2_top_keys"] = top
    else:
        notes.append("2_top_keys is left out: the stretch has neither a local nor a global query")
    if found.coverage:
        figures["6a_coverage"] = _coverage(found)
    else:
        notes.append(
            f"6a_coverage is left out: the text before the interval has no more than the "
            f"{OBSERVED} queries of an observation set"
        )
    return dict(sorted(figures.items())), notes


def _attention_map(found: Inspection, texts: Sequence[str]) -> Numbers:
    start, end = found.stretch
    head = found.head
    rows = attention_rows(head.query, head.key, start, end, head.scaling)
    width = -(-end // _COLUMNS)
    rows = torch.nn.functional.pad(rows, (0, -end % width))
    return {
        **_shown(found),
        "positions": list(range(start, end)),
        "texts": list(texts[start:end]),
        "kinds": _names(head.kind[start:end]),
        "median_distances": head.median[start:end].tolist(),
        "keys_in_a_column": width,
        "largest_weight_in_a_column": _rounded(rows.unflatten(1, (-1, width)).amax(-1)),
    }


def _distances(found: Inspection) -> Numbers:
    """The heads with the most global queries, of those that have local ones too."""
    totals = found.histograms.sum(-1)  # [L, H, 2]
    rank = (found.text_counts * (totals > 0).all(-1)).flatten()
    chosen = rank.sort(descending=True, stable=True).indices[:_HEADS].tolist()
    if rank.any():
        chosen = [place for place in chosen if rank[place] > 0]
    heads = found.counts.shape[1]
    return {
        "bin_width": found.bin_width,
        "queries": [found.prompt, found.length],
        "heads": [
            {
                "layer": place // heads,
                "head": place % heads,
                "global_queries": int(found.text_counts.flatten()[place]),
                "local": found.histograms[place // heads, place % heads, 0].tolist(),
                "global": found.histograms[place // heads, place % heads, 1].tolist(),
            }
            for place in chosen
        ],
    }


def _top_keys(found: Inspection, texts: Sequence[str]) -> Numbers:
    head = found.head
    queries = []
    for position in _neighbours(head.kind, found.stretch):
        weights = attention_rows(head.query, head.key, position, position + 1, head.scaling)[0]
        top = [key for key in head.top[position].tolist() if key != MISSING]
        queries.append(
            {
                "position": position,
                "text": texts[position],
                "kind": KIND_NAMES[head.kind[position]],
                "median_distance": head.median[position].item(),
                "keys": [
                    {"position": key, "text": texts[key], "weight": _rounded(weights[key])}
                    for key in top
                ],
            }
        )
    return {**_shown(found), "queries": queries}


def _global_queries(found: Inspection, texts: Sequence[str]) -> Numbers:
    start, end = found.interval
    return {
        "interval": [start, end],
        "global_queries": found.counts.tolist(),
        "in_the_whole_text": found.text_counts.tolist(),
        "texts": list(texts[start:end]),
        "heads_where_global": found.heads_where_global[start:end].tolist(),
    }


def _similarity(found: Inspection) -> Numbers:
    start, end = found.interval
    kind = found.head.kind[start:end]
    queries = found.head.unrotated[start:end]
    similarity = cosine_similarity(queries, queries)
    local, far = kind == LOCAL, kind == GLOBAL
    return {
        **_shown(found),
        "positions": list(range(start, end)),
        "kinds": _names(kind),
        "mean_similarity": {
            "local to other local": _mean_of_pairs(similarity, local, local),
            "global to other global": _mean_of_pairs(similarity, far, far),
            "global to local": _mean_of_pairs(similarity, far, local),
        },
        "similarity": _rounded(similarity),
    }


def _plane(found: Inspection) -> Numbers:
    written = slice(found.prompt, found.length)
    points, share = principal_plane(found.head.unrotated[written])
    return {
        **_shown(found),
        "positions": list(range(found.prompt, found.length)),
        "kinds": _names(found.head.kind[written]),
        "points": _rounded(points),
        "share_of_variance": _rounded(share),
    }


def _coverage(found: Inspection) -> Numbers:
    start, end = found.interval
    return {
        "built_at": start,
        "chosen_from": [found.prompt, start],
        "steps": list(range(start, end)),
        "seed": found.rules.seed,
        "similarity": {name: _rounded(rows.mean(0)) for name, rows in found.coverage.items()},
        "mean": {name: _rounded(rows.mean()) for name, rows in found.coverage.items()},
        "mean_of_each_layer": {
            name: _rounded(rows.mean(1)) for name, rows in found.coverage.items()
        },
    }


def _shown(found: Inspection) -> Numbers:
    return {"layer": found.head.layer, "head": found.head.head}


def _neighbours(kind: Tensor, stretch: tuple[int, int]) -> list[int]:
    """Positions of the global queries with the nearest local ones, and of those: two pairs.

    Where a stretch lacks one kind, two queries of the other.
    """
    start, end = stretch
    inside = kind[start:end]
    local = (inside == LOCAL).nonzero()[:, 0] + start
    far = (inside == GLOBAL).nonzero()[:, 0] + start
    if not len(local) or not len(far):
        return torch.cat([local, far])[:_PAIRS].tolist()
    chosen: list[int] = []
    apart = (far[:, None] - local).abs()
    for _ in range(min(_PAIRS, len(local), len(far))):
        row, column = divmod(int(apart.argmin()), len(local))
        chosen += [int(far[row]), int(local[column])]
        apart[row], apart[:, column] = len(kind), len(kind)
    return sorted(chosen)


def _names(kind: Tensor) -> list[str]:
    return [KIND_NAMES[number] for number in kind.tolist()]


def _mean_of_pairs(similarity: Tensor, first: Tensor, second: Tensor) -> float | None:
    """Over pairs of two different queries; None if there is none."""
    pairs = first[:, None] & second
    pairs.fill_diagonal_(False)
    return _rounded(similarity[pairs].mean()) if pairs.any() else None


def _rounded(values: Tensor) -> Any:
    """As numbers or lists of numbers, to 6 digits behind the point."""
    return values.double().round(decimals=6).tolist()
