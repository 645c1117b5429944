"""How long the answers to problems that are worked in the open may be."""

from __future__ import annotations

from collections.abc import Callable

from zoomkv.data.traces import Trace


def worked_tokens(trace: Trace, count: Callable[[str], int]) -> int:
    """Half as many tokens again as a trace's paragraphs, summaries and solution have."""
    parts = [part for segment in trace.segments for part in (segment.text, segment.summary)]
    return -(-3 * count("\n\n".join([*filter(None, parts), trace.solution])) // 2)
