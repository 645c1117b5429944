"""Pictures of an inspection, drawn from the numbers of ``figure_numbers`` alone.

Each is 1,600 pixels wide, with type that can be read at 800. Colours are those of Okabe and Ito
or cividis, which colour-blind readers can tell apart; kinds differ in shape, lines in dashes too.
Needs matplotlib, and no display.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from zoomkv.evaluation.figure_numbers import Numbers

COLOURS = {"local": "#0072B2", "between": "#8C8C8C", "global": "#D55E00"}
_MARKERS = {"local": "o", "between": "x", "global": "^"}
_LINES = (("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", "-."), ("#000000", ":"))
_WIDTH, _DPI = 8.0, 200
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "text.parse_math": False,  # a token may hold a dollar sign
}
_LONGEST = 40  # characters of a token or a run of tokens
_TEXT_LINE = 112  # characters below a panel of top keys


def draw(name: str, numbers: Numbers, path: str | os.PathLike[str]) -> None:
    """Draws one figure into a PNG file.

    Args:
        name: Its stem, such as ``3_global_queries``.
        numbers: What ``figure_numbers`` gives for it.
        path: Where to.
    """
    with rc_context(_STYLE), warnings.catch_warnings():
        # Scripts that the font lacks are drawn as boxes; their texts are in the numbers.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = _DRAWN[name](numbers)
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=_DPI)


def _attention_map(numbers: Numbers) -> Figure:
    positions, weights = numbers["positions"], numbers["largest_weight_in_a_column"]
    rows, width = len(positions), numbers["keys_in_a_column"]
    figure = _figure(min(9.0, 1.7 + 0.19 * max(rows, 12)))
    axes = figure.subplots()
    first, last = positions[0], positions[-1]
    image = axes.imshow(
        [[max(weight, 1e-6) for weight in row] for row in weights],
        aspect="auto",
        cmap="cividis",
        norm=LogNorm(1e-4, 1),
        extent=(0, len(weights[0]) * width, last + 0.5, first - 0.5),
    )
    axes.set_xlabel("Key position")
    axes.set_ylabel("Query token")
    axes.set_title(
        f"Attention weights of layer {numbers['layer']}, head {numbers['head']}"
        "  (orange: global queries)"
    )
    if rows <= 48:
        axes.set_yticks(positions)
        labels = [
            f"{position}: {visible(text)}"
            for text, position in zip(numbers["texts"], positions, strict=True)
        ]
        axes.set_yticklabels(labels, fontsize=8)
        for label, kind in zip(axes.get_yticklabels(), numbers["kinds"], strict=True):
            label.set_color(COLOURS["global"] if kind == "global" else "black")
            label.set_fontweight("bold" if kind == "global" else "normal")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _mark(axes, positions, numbers["kinds"], along_x=False)
    what = "Attention weight" if width == 1 else f"Largest attention weight of {width} keys"
    figure.colorbar(image, ax=axes, label=what, pad=0.02, extend="min", format="%g")
    return figure


def _distances(numbers: Numbers) -> Figure:
    heads, width = numbers["heads"], numbers["bin_width"]
    columns = min(3, len(heads))
    rows = -(-len(heads) // columns)
    figure = _figure(1.2 + 2.2 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, head in zip(panels, heads, strict=False):
        edges = [width * number for number in range(len(head["local"]) + 1)]
        for kind, hatch in (("local", None), ("global", "////")):
            counts = head[kind]
            total = max(sum(counts), 1)
            axes.stairs(
                [100 * count / total for count in counts],
                edges,
                fill=True,
                facecolor=to_rgba(COLOURS[kind], 0.3),
                edgecolor=COLOURS[kind],
                lw=0.8,
                hatch=hatch,
                label=f"{kind} queries",
            )
        axes.set_title(
            f"layer {head['layer']}, head {head['head']} ({head['global_queries']} global)"
        )
    for axes in panels[len(heads) :]:
        axes.set_axis_off()
    figure.supxlabel("Distance from the query to its top keys, tokens", fontsize=11)
    figure.supylabel(f"Top keys, % in bins of {width}", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _top_keys(numbers: Numbers) -> Figure:
    queries = numbers["queries"]
    notes = ["\n".join(wrap(_runs(query["keys"]), _TEXT_LINE)) for query in queries]
    lines = sum(note.count("\n") + 1 for note in notes)
    figure = _figure(1.0 + 1.25 * len(queries) + 0.17 * lines)
    panels = figure.subplots(len(queries), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    # The first token often takes nearly all the weight; on a log scale the others are seen too.
    least = min(key["weight"] for query in queries for key in query["keys"])
    floor = max(least, 1e-6) / 3
    for axes, query, note in zip(panels, queries, notes, strict=True):
        colour = COLOURS[query["kind"]]
        places = [key["position"] for key in query["keys"]]
        weights = [max(key["weight"], floor) for key in query["keys"]]
        axes.set_yscale("log")
        axes.vlines(places, floor, weights, color=colour, lw=1)
        axes.plot(places, weights, _MARKERS[query["kind"]], color=colour, ms=4)
        axes.axvline(query["position"], color="black", lw=1, ls=":")
        axes.set_ylim(floor, 1.5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(
            f"{query['kind']} query {query['position']}: {visible(query['text'])}"
            f"   (median distance {query['median_distance']:g})",
            loc="left",
            color=colour,
            fontweight="bold",
        )
        axes.annotate(
            note,
            (0, 0),
            xytext=(0, -20),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize=8.5,
        )
        axes.tick_params(labelbottom=True)
    figure.supxlabel(
        f"Key position; the dotted line is the query (layer {numbers['layer']}, "
        f"head {numbers['head']})",
        fontsize=11,
    )
    figure.supylabel("Attention weight of the top keys", fontsize=11)
    return figure


def _global_queries(numbers: Numbers) -> Figure:
    counts = numbers["global_queries"]
    layers, heads = len(counts), len(counts[0])
    figure = _figure(4.6)
    axes = figure.subplots()
    # Layers run along the longer side of the picture.
    image = axes.imshow(
        [list(column) for column in zip(*counts, strict=True)],
        aspect="auto",
        cmap="cividis",
        origin="lower",
        vmin=0,
        vmax=max(1, max(map(max, counts))),
        extent=(-0.5, layers - 0.5, -0.5, heads - 0.5),
    )
    axes.set_xlabel("Layer")
    axes.set_ylabel("Head")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    start, end = numbers["interval"]
    axes.set_title(f"Global queries among tokens {start} to {end - 1}")
    bar = figure.colorbar(image, ax=axes, label="Global queries", pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _similarity(numbers: Numbers) -> Figure:
    positions, similarity = numbers["positions"], numbers["similarity"]
    figure = _figure(6.6)
    axes = figure.subplots()
    first, last = positions[0] - 0.5, positions[-1] + 0.5
    image = axes.imshow(similarity, cmap="cividis", vmax=1, extent=(first, last, last, first))
    axes.set_xlabel("Query position")
    axes.set_ylabel("Query position")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_title(
        f"Queries before RoPE, layer {numbers['layer']}, head {numbers['head']}"
        "  (triangles: global)",
        pad=12,
    )
    _mark(axes, positions, numbers["kinds"], along_x=True)
    _mark(axes, positions, numbers["kinds"], along_x=False)
    figure.colorbar(image, ax=axes, label="Cosine similarity", pad=0.03)
    return figure


def _plane(numbers: Numbers) -> Figure:
    figure = _figure(5.6)
    axes = figure.subplots()
    for kind in ("local", "between", "global"):
        points = [
            point
            for point, of in zip(numbers["points"], numbers["kinds"], strict=True)
            if of == kind
        ]
        if not points:
            continue
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=22,
            marker=_MARKERS[kind],
            color=COLOURS[kind],
            alpha=0.6,
            lw=1 if kind == "between" else 0,
            label=f"{kind} ({len(points)})",
        )
    first, second = (100 * share for share in numbers["share_of_variance"])
    axes.set_xlabel(f"First principal component ({first:.0f} % of the variance)")
    axes.set_ylabel(f"Second ({second:.0f} %)")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(f"Queries before RoPE, layer {numbers['layer']}, head {numbers['head']}")
    axes.legend(loc="best", title="Query")
    return figure


def _coverage(numbers: Numbers) -> Figure:
    figure = _figure(4.8)
    axes = figure.subplots()
    means = numbers["mean"]
    styles = zip(numbers["similarity"].items(), _LINES, strict=True)
    for (name, values), (colour, dashes) in styles:
        axes.plot(
            numbers["steps"],
            values,
            color=colour,
            ls=dashes,
            lw=1.5,
            label=f"{name} (mean {means[name]:.3f})",
        )
    axes.set_xlabel("Position of the later query")
    axes.set_ylabel("Max. cosine similarity, mean of all heads")
    axes.set_title(
        f"How near observation queries chosen at {numbers['built_at']} are to later ones"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


_DRAWN: dict[str, Callable[[Numbers], Figure]] = {
    "1a_attention_map": _attention_map,
    "1b_distances": _distances,
    "2_top_keys": _top_keys,
    "3_global_queries": _global_queries,
    "4a_similarity": _similarity,
    "4b_plane": _plane,
    "6a_coverage": _coverage,
}


def visible(text: str) -> str:
    """A text on one line, no longer than 40 characters: line ends and other controls are escaped.

    Leading and trailing spaces would be lost beside other text, so they are drawn as ``·``.
    """
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    right = len(text) - len(inner) - left if inner else 0
    escaped = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in inner
    )
    shown = "·" * left + escaped + "·" * right
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _mark(axes: Axes, positions: Sequence[int], kinds: Sequence[str], along_x: bool) -> None:
    """Small triangles outside the picture's edge at the global queries."""
    places = [place for place, kind in zip(positions, kinds, strict=True) if kind == "global"]
    beyond = [1.015] * len(places)
    style: dict[str, Any] = {
        "color": COLOURS["global"],
        "clip_on": False,
        "ls": "none",
        "ms": 5,
        "marker": "v" if along_x else "<",
    }
    if along_x:
        axes.plot(places, beyond, transform=axes.get_xaxis_transform(), **style)
    else:
        axes.plot(beyond, places, transform=axes.get_yaxis_transform(), **style)


def _runs(keys: Sequence[Numbers]) -> str:
    """Top keys in the order of the text; neighbours are one piece: ``17-19 'Step·copper'``."""
    runs: list[list[Numbers]] = []
    for key in sorted(keys, key=lambda key: key["position"]):
        if runs and runs[-1][-1]["position"] + 1 == key["position"]:
            runs[-1].append(key)
        else:
            runs.append([key])
    pieces = []
    for run in runs:
        first, last = run[0]["position"], run[-1]["position"]
        place = f"{first}" if first == last else f"{first}-{last}"
        piece = f"{place} '{visible(''.join(key['text'] for key in run))}'"
        pieces.append(piece.replace(" ", "\N{NO-BREAK SPACE}"))  # lines break between pieces
    return ", ".join(pieces)
