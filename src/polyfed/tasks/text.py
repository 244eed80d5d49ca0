"""AG News, read from its CSV layout, as numbers for words.

    ag_news_csv/{train,test}.csv, plain or .gz: "label","title","description" with labels 1 to 4
    ag_news_csv/{train_10k,test}.csv: the same, with fewer rows to train on

A word is a run of letters and digits, in lower case. The vocabulary is that of the official train
rows, the most frequent word first: 0 is padding, 1 stands for every word that is not in it. No word
is hashed, so that each number means one word. A text is its title and its description.

Zhang, Zhao, LeCun, NIPS 2015, arXiv:1509.01626.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.errors import ConfigError
from polyfed.tasks.layout import Layout, Published, damaged, locate, unpacked

CLASSES = ("World", "Sports", "Business", "Sci/Tech")
SPECIAL = ("<padding>", "<unknown>")

_PLACES = (".", "ag_news_csv", "ag_news", "AG_NEWS")
_AG_NEWS = Published(
    "AG News",
    (Layout(("train.csv", "test.csv"), _PLACES), Layout(("train_10k.csv", "test.csv"), _PLACES)),
    "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html (as CSV: arXiv:1509.01626)",
)
_WORD = re.compile(r"[^\W_]+")

Words = list[str]


@dataclass(frozen=True, eq=False)
class Texts:
    """Labelled texts, official train texts first.

    Attributes:
        x: Numbers of the words, padded with 0 to one length.
        y: Labels.
        classes: Name of each label.
        vocabulary: Word of each number.
        num_train: The first so many are the official train texts.
        whole: How many texts were published.
    """

    x: Int64[Tensor, "n length"]
    y: Int64[Tensor, " n"]
    classes: tuple[str, ...]
    vocabulary: tuple[str, ...]
    num_train: int
    whole: int


def agnews(folder: Path, *, length: int = 64, min_count: int = 2) -> Texts:
    """Read AG News.

    Args:
        folder: The layout folder, or the one that holds it.
        length: Words kept of a text; shorter ones are padded.
        min_count: How often a word occurs in the train texts at least, to be in the vocabulary.
    """
    if length < 1 or min_count < 1:
        raise ConfigError(f"length and min_count must be >= 1, got {length} and {min_count}.")
    _, paths = locate(folder, _AG_NEWS)
    (train, y_train), (test, y_test) = map(_rows, paths)
    known = vocabulary(train, min_count)
    x = numbers([*train, *test], known, length)
    y = torch.tensor(y_train + y_test)
    return Texts(x, y, CLASSES, known, num_train=len(train), whole=127_600)


def words(text: str) -> Words:
    """The words of a text.

    >>> words("Oil's at $54.10, U.S. says")
    ['oil', 's', 'at', '54', '10', 'u', 's', 'says']
    """
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[Words], min_count: int) -> tuple[str, ...]:
    """Padding, the unknown word, then words by falling frequency, equals in alphabetical order.

    >>> vocabulary([["b", "a", "c"], ["c", "b"]], min_count=1)
    ('<padding>', '<unknown>', 'b', 'c', 'a')
    """
    counts = Counter(word for text in texts for word in text)
    kept = [word for word, count in counts.items() if count >= min_count]
    return (*SPECIAL, *sorted(kept, key=lambda word: (-counts[word], word)))


def numbers(
    texts: Sequence[Words], known: Sequence[str], length: int
) -> Int64[Tensor, "n {length}"]:
    """The first words of each text as their places in the vocabulary.

    >>> numbers([["b", "x"], []], ("<padding>", "<unknown>", "b"), 3).tolist()
    [[2, 1, 0], [0, 0, 0]]
    """
    place = {word: i for i, word in enumerate(known)}
    rows = [[place.get(word, 1) for word in text[:length]] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64)


def _rows(path: Path) -> tuple[list[Words], list[int]]:
    """Words and labels, from 0, of the rows of a file."""
    try:
        text = unpacked(path, _AG_NEWS).decode("utf-8")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        size = f"{path.stat().st_size} bytes that do not read as CSV"
        damaged(path, size, _AG_NEWS, because=error)
    if not rows:
        damaged(path, "no rows, expected at least 1", _AG_NEWS)
    for i, row in enumerate(rows, 1):
        if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
            start = ",".join(row)[:40]
            expected = "expected a label from 1 to 4, a title and a description"
            damaged(path, f"row {i} '{start}', {expected}", _AG_NEWS)
    return [words(f"{title} {body}") for _, title, body in rows], [int(r[0]) - 1 for r in rows]
