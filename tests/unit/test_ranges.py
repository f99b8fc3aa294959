"""Lists of numbers and layers."""

import pytest
from lvllm.ranges import format_numbers, parse_layers, parse_numbers, select_layers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", (0,)), ("0-2", (0, 1, 2)), ("0-1,4", (0, 1, 4)), (" 0 - 2 ", (0, 1, 2)), ("3,3,1", (1, 3))],
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "2-0", "-1", "a", "1-", "0,,1", "1.5", "0x1"])
def test_illegal_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|backwards"):
        parse_numbers(text)


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2, 5), (7, 9)])
def test_format_is_the_inverse(numbers: tuple[int, ...]) -> None:
    text = format_numbers(numbers)
    assert (parse_numbers(text) if text else ()) == numbers


def select(text: str, main: int = 4, draft: int = 2) -> tuple[list[int], list[int]]:
    chosen = select_layers(parse_layers(text), num_main=main, num_draft=draft, variable="LAYERS")
    return sorted(chosen.main), sorted(chosen.draft)


@pytest.mark.parametrize(
    ("text", "main", "draft"),
    [
        ("", [], []),
        ("none", [], []),
        ("0", [0], []),
        ("0-2", [0, 1, 2], []),
        ("0-1,3", [0, 1, 3], []),
        (" 0 - 2 ", [0, 1, 2], []),
        ("1,1,0-1", [0, 1], []),
        ("all", [0, 1, 2, 3], [0, 1]),
        ("main:all", [0, 1, 2, 3], []),
        ("mtp:all", [], [0, 1]),
        ("main:0-2,mtp:0", [0, 1, 2], [0]),
        ("main:0,2,mtp:1", [0, 2], [1]),
        ("MTP: 0-1", [], [0, 1]),
        ("0-1,4-5", [0, 1], [0, 1]),
    ],
)
def test_layers(text: str, main: list[int], draft: list[int]) -> None:
    assert select(text) == (main, draft)


@pytest.mark.parametrize("text", ["2-0", "-1", "first", "0;1", "head:0", "auto,0", "1-a"])
def test_illegal_layers(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|backwards|part|combined"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [("0-999", "6-999"), ("6", "6"), ("main:4", "4"), ("mtp:2", "2"), ("0-13,43-45", "6-13")],
)
def test_layers_beyond_the_model_are_errors_that_name_the_counts(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.*do not exist.*4 main layers \(0-3\) and 2 draft layers"):
        select(text)


def test_bare_numbers_of_draft_layers_give_a_notice() -> None:
    chosen = select_layers(parse_layers("0,4"), num_main=4, num_draft=1, variable="LAYERS")
    assert chosen.notes == ["LAYERS='0,4': layers 4 are taken as draft layers 0; mtp:0 says the same"]


def test_the_draft_variable_counts_from_zero() -> None:
    spec = parse_layers("0-1", part="mtp")
    assert (spec.draft, spec.main, spec.bare) == ({0, 1}, set(), set())
