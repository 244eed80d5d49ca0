"""AG News: rows written here, words counted by hand."""

import gzip
import os
from pathlib import Path

import pytest
import torch

from polyfed.errors import ConfigError, DataError
from polyfed.tasks import text

TRAIN = (
    '"3","Oil up, oil out","Oil at $54.10; analysts\\say ""wait""."\n'
    '"1","Peace talks","The talks\nwent on: peace near"\n'
    '"4","A probe","Probe of Titan, near Saturn"\n'
)
TEST = '"2","Oil kings win","Kings 3, Oil 2"\n'


def write(folder: Path, train: str = TRAIN, test: str = TEST, name: str = "train.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(train, encoding="utf-8", newline="")
    (folder / "test.csv").write_text(test, encoding="utf-8", newline="")
    return folder


def spelt(texts: text.Texts) -> list[list[str]]:
    """The words that the numbers stand for."""
    return [[texts.vocabulary[i] for i in row if i] for row in texts.x.tolist()]


@pytest.mark.parametrize("below", ["", "ag_news_csv", "ag_news"])
@pytest.mark.parametrize("name", ["train.csv", "train_10k.csv"])
def test_read_back(tmp_path: Path, below: str, name: str) -> None:
    write(tmp_path / below, name=name)
    texts = text.agnews(tmp_path, length=12, min_count=1)
    assert spelt(texts) == [
        ["oil", "up", "oil", "out", "oil", "at", "54", "10", "analysts", "say", "wait"],
        ["peace", "talks", "the", "talks", "went", "on", "peace", "near"],
        ["a", "probe", "probe", "of", "titan", "near", "saturn"],
        ["oil", "<unknown>", "<unknown>", "<unknown>", "<unknown>", "oil", "<unknown>"],
    ]
    assert texts.x.shape == (4, 12)
    assert texts.x.dtype == torch.int64
    assert [texts.classes[y] for y in texts.y.tolist()] == [
        "Business", "World", "Sci/Tech", "Sports",
    ]  # fmt: skip
    assert texts.num_train == 3


def test_vocabulary_by_hand(tmp_path: Path) -> None:
    """oil 3; near, peace, probe, talks 2; all else once, and the test rows do not count."""
    texts = text.agnews(write(tmp_path), min_count=2)
    assert texts.vocabulary == (
        "<padding>", "<unknown>", "oil", "near", "peace", "probe", "talks",
    )  # fmt: skip
    assert texts.x[2].tolist()[:8] == [1, 5, 5, 1, 1, 3, 1, 0]


def test_length_cuts_and_pads(tmp_path: Path) -> None:
    texts = text.agnews(write(tmp_path), length=3, min_count=2)
    assert texts.x.tolist() == [[2, 1, 2], [4, 6, 1], [1, 5, 5], [2, 1, 1]]


def test_a_word_of_the_text_is_never_padding(tmp_path: Path) -> None:
    write(tmp_path, train='"1","<padding> unknown padding","<unknown>"\n')
    texts = text.agnews(tmp_path, length=5, min_count=1)
    assert spelt(texts)[0] == ["padding", "unknown", "padding", "unknown"]


def test_accents_and_underscores() -> None:
    assert text.words("São_Paulo\tNAÏVE—3rd") == ["são", "paulo", "naïve", "3rd"]


def test_packed_and_whole_before_partial(tmp_path: Path) -> None:
    write(tmp_path, train='"1","x","y"\n', name="train_10k.csv")
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(TRAIN.encode()))
    assert text.agnews(tmp_path).num_train == 3
    (tmp_path / "train.csv").write_text('"1","x","y"\n"2","x","y"\n')
    assert text.agnews(tmp_path).num_train == 2  # the plain file goes before the packed one


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("", "no rows, expected at least 1"),
        ('"5","a","b"\n', "row 1 '5,a,b', expected a label from 1 to 4"),
        ('"1","a","b"\n"0","a","b"\n', "row 2 '0,a,b'"),
        ('"1","a"\n', "row 1 '1,a', expected a label from 1 to 4, a title and a description"),
        ('"1","a","b', "do not read as CSV .*unexpected end of data"),
        ("<html>no</html>", "row 1 '<html>no</html>'"),
    ],
)
def test_damaged_rows(tmp_path: Path, train: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"train\.csv is truncated or damaged: .*{says}"):
        text.agnews(write(tmp_path, train=train))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (write(tmp_path) / "test.csv").write_bytes(b'"1","\xff\xfe","b"\n')
    with pytest.raises(DataError, match=r"test\.csv .*got 13 bytes that do not read as CSV"):
        text.agnews(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"AG News was not found(.|\n)*train_10k\.csv(.|\n)*--data"):
        text.agnews(tmp_path)


@pytest.mark.parametrize("values", [{"length": 0}, {"min_count": 0}])
def test_options_that_cannot_be(tmp_path: Path, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="length and min_count must be >= 1"):
        text.agnews(tmp_path, **values)


@pytest.mark.real_data
def test_real_agnews() -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: it names a folder with the published files")
    try:
        texts = text.agnews(Path(os.environ["POLYFED_DATA"]))
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert torch.bincount(texts.y[texts.num_train :]).tolist() == [1900] * 4
    assert texts.num_train in (9_999, 120_000)
    assert texts.vocabulary[2] == "the"
    assert bool((texts.x[:, 0] > 0).all())
    assert int(texts.x.max()) < len(texts.vocabulary)
