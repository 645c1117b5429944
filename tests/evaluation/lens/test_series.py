"""A table's series give back the table of every step."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.evaluation.lens.series import Log, Series


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[np.ndarray]]:
    """What new columns hold, and tables of a growing number of columns."""
    initial = draw(st.lists(st.integers(0, 255), min_size=1, max_size=4))
    seed, calm = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.1, 0.9]))
    generator = np.random.default_rng(seed)
    tables, table = [], np.zeros((len(initial), 0), np.uint8)
    for new in draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)):
        fresh = np.repeat(np.array(initial, np.uint8)[:, None], new, 1)
        table = np.concatenate([table, fresh], 1)
        other = generator.integers(0, 256, table.shape, np.uint8)
        table = np.where(generator.random(table.shape) < calm, other, table)
        tables.append(table)
    return initial, tables


def logged(initial: list[int], tables: list[np.ndarray]) -> Log:
    log = Log(initial)
    for table in tables:
        log.add(table)
    return log


def series_of(log: Log) -> Series:
    return Series.of_rows((int(n), log.row(row, log.columns)) for row, n in enumerate(log.initial))


@given(histories())
def test_every_step_comes_back(history: tuple[list[int], list[np.ndarray]]) -> None:
    initial, tables = history
    columns = tables[-1].shape[1]
    series = series_of(logged(initial, tables))
    told = series.encoded()
    decoded = Series.decoded(told, len(initial) * columns, len(tables))
    first = np.repeat(np.array(initial, np.uint8)[:, None], columns, 1)
    for step, table in enumerate(tables):
        for each in (series, decoded):
            assert (each.at(step, first)[:, : table.shape[1]] == table).all()
    assert decoded.encoded() == told


@given(histories())
def test_rows_are_those_of_the_tables(history: tuple[list[int], list[np.ndarray]]) -> None:
    initial, tables = history
    log = logged(initial, tables)
    for number, value in enumerate(initial):
        row = log.row(number, log.columns)
        for step, table in enumerate(tables):
            missing = [value] * (log.columns - table.shape[1])
            assert row[:, step].tolist() == table[number].tolist() + missing


def test_nothing_is_told_where_nothing_changes() -> None:
    table = np.array([[0, 0], [3, 3]], np.uint8)
    series = series_of(logged([0, 3], [table, table.copy()]))
    assert series.counts.tolist() == [0] * 4 and not len(series.steps)


def test_what_is_told_by_hand() -> None:
    """Two rows of three columns in three steps."""
    tables = [
        np.array([[0, 0, 0], [3, 1, 3]], np.uint8),
        np.array([[2, 0, 0], [3, 1, 0]], np.uint8),
        np.array([[2, 0, 0], [3, 4, 0]], np.uint8),
    ]
    series = series_of(logged([0, 3], tables))
    assert series.counts.tolist() == [1, 0, 0, 0, 2, 1]
    assert series.steps.tolist() == [1, 0, 2, 1]
    assert series.values.tolist() == [2, 1, 4, 0]
    gaps = zlib.decompress(base64.b64decode(series.encoded()["gaps"]))
    assert gaps == bytes([1, 0, 2, 1]) + bytes(12)  # lowest bytes first


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


TOLD = series_of(logged([0], [np.zeros((1, 2), np.uint8), np.array([[0, 7]], np.uint8)])).encoded()


@pytest.mark.parametrize(
    ("told", "places", "steps", "message"),
    [
        ({}, 2, 2, "can't be decoded"),
        ([], 2, 2, "can't be decoded"),
        ({**TOLD, "values": "%"}, 2, 2, "can't be decoded"),
        ({**TOLD, "values": "AAAA"}, 2, 2, "can't be decoded"),
        ({**TOLD, "values": 7}, 2, 2, "can't be decoded"),
        ({**TOLD, "counts": packed(b"123")}, 2, 2, "half a number"),
        ({**TOLD, "values": packed(b"12")}, 2, 2, "contradict each other"),
        ({**TOLD, "counts": packed(bytes(8))}, 2, 2, "contradict each other"),
        (TOLD, 3, 2, "contradict each other"),
        (TOLD, 2, 1, "behind the last step"),
    ],
)
def test_what_is_no_series_is_refused(told: object, places: int, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Series.decoded(told, places, steps)
