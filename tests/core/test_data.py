import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from polyfed.core.data import Data, Split
from polyfed.errors import DataError, UnknownNameError

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
CPU = torch.device("cpu")


class Items(Dataset):
    """A map-style data set of whatever items it is given."""

    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


class CountedStream(Stream):
    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        [X.numpy(), Y.numpy()],
        (X.tolist(), Y.tolist()),
        (X, Y.numpy().astype(np.int32)),
        (X, Y.to(torch.uint8)),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(6)),
        Items(list(zip(X.numpy(), Y.tolist(), strict=True))),
        Items([[x, y] for x, y in zip(X, Y, strict=True)]),
        Split(X, Y),
    ],
    ids=lambda s: type(s).__name__,
)
def test_labelled_sources(source: object) -> None:
    split = Split.of(source)
    assert torch.equal(split.x, X)
    assert split.y is not None
    assert torch.equal(split.y, Y)
    assert split.y.dtype == torch.int64  # whatever integers came: cross-entropy takes no others


@pytest.mark.parametrize("source", [X, X.numpy(), Items(list(X)), TensorDataset(X)])
def test_unlabelled_sources(source: object) -> None:
    split = Split.of(source)
    assert torch.equal(split.x, X)
    assert split.y is None


def test_a_tensor_is_taken_as_it_is() -> None:
    assert Split.of((X, Y)).x is X
    assert Split.of((X, Y)).y is Y
    assert Split.of((X, X[:, 0])).y.dtype == torch.float32  # a regression target stays what it is


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Stream(), "Stream is iterable.*map-style.*into tensors first"),
        (CountedStream(), "CountedStream is iterable.*into tensors first"),
        (Items([]), "Items is empty"),
        (Items([(X[0], 1, 2)]), r"item has 3 fields, expected \(x, y\)"),
        (Items([(X[0], 1), (X[0, :1], 1)]), "items of Items do not stack"),
        (Items([{"x": 1}]), "items of Items do not stack"),
        ((X, Y[:5]), "6 inputs but 5 labels"),
        ((X, 1), "the labels are a single number, expected one per row"),
        (3.0, "a single number, expected one per row"),
        (["a", "b", "c"], "a list does not become a tensor"),
    ],
)
def test_sources_that_are_refused(source: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Data(train=source)


def test_data_is_a_mapping_without_empty_splits() -> None:
    data = Data(train=(X, Y), val_es=(X[:0], Y[:0]), test=None)
    assert (list(data), len(data)) == (["train"], 1)
    assert ("val_es" in data, data.get("test"), data.get("train")) == (False, None, data["train"])
    with pytest.raises(UnknownNameError, match=r"unknown data split 'trian'. Did you mean 'train'"):
        data["trian"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_numbers_are_reported_with_their_index(bad: float) -> None:
    x = X.clone()
    x[2, 1] = x[4, 0] = x[4, 1] = bad
    with pytest.raises(
        DataError, match=r"node A, split 'test': NaN or infinity in 2 of 6.*index 2"
    ):
        Data(train=(X, Y), test=(x, Y)).check("A")
    with pytest.raises(DataError, match=r"node A, split 'public': NaN.* in 1 of 6.*index 5"):
        Data(train=(X, Y), public=torch.tensor([0.0, 1, 2, 3, 4, bad])).check("A")


def test_values_are_read_once_unless_they_change_but_classes_always_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = X.clone()
    Data(train=(x, Y)).check("A")
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "sum", lambda *_: pytest.fail("read again"))
        Data(train=(x, Y)).check("B")
        with pytest.raises(DataError, match="no sample of class 2"):
            Data(train=(x, Y), val_es=(x, Y % 2)).check("C")
    x[3, 0] = torch.nan
    for node in "DE":  # what is wrong is not remembered as fine
        with pytest.raises(DataError, match=r"NaN or infinity in 1 of 6.*index 3"):
            Data(train=(x, Y)).check(node)


def test_large_numbers_are_numbers() -> None:
    x = torch.full((6, 2), torch.finfo(torch.float32).max)
    assert not torch.isfinite(x.sum())
    Data(train=(x, Y)).check("A")
    with torch.inference_mode():
        made_there = X + 0
    Data(train=(made_there, Y)).check("A")


@pytest.mark.parametrize("name", ["val_es", "val_rb"])
def test_a_class_missing_in_validation(name: str) -> None:
    splits = {"train": (X, Y), name: (X[:2], Y[:2])}
    with pytest.raises(
        DataError,
        match=rf"node B: validation split '{name}' \(2 samples\) has no sample of class 2, .*train",
    ):
        Data(**splits).check("B")
    Data(may_miss_classes=True, **splits).check("B")
    Data(train=(X[:2], Y[:2]), **{name: (X, Y)}).check("B")  # more classes than train are fine
    Data(train=(X, X[:, 0]), **{name: (X[:2], X[:2, 0])}).check("B")  # and so is regression


def test_fingerprint_tells_order_content_shape_and_dtype() -> None:
    digest = Split(X).fingerprint()
    assert digest == Split(X.clone(), Y).fingerprint()
    assert digest == Split(X.T.contiguous().T).fingerprint()  # strides are no content
    changed = X.clone()
    changed[5, 1] = torch.nextafter(changed[5, 1], torch.tensor(100.0))
    others = [X.flip(0), changed, X.reshape(6, 1, 2), X.double(), X[:5], X.flatten()]
    digests = {Split(x).fingerprint() for x in others}
    assert len(digests) == len(others)
    assert digest not in digests
    assert len(Split(torch.zeros(2, dtype=torch.bfloat16)).fingerprint()) == 16


def test_to_moves_a_shared_tensor_once() -> None:
    meta, moved = torch.device("meta"), dict[int, torch.Tensor]()
    a = Data(train=(X, Y), public=X).to(meta, moved)
    b = Data(may_miss_classes=True, public=X).to(meta, moved)
    assert a["public"].x is a["train"].x is b["public"].x
    assert a["train"].y is not None
    assert a["train"].y.device.type == "meta"
    assert (a.may_miss_classes, b.may_miss_classes) == (False, True)
    assert Data(train=(X, Y)).to(CPU, {})["train"].x is X  # nothing is copied in place
    assert Split(X, Y).to(meta).x.device.type == "meta"
