import json
import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.message import Message, TensorSpec, look_at
from polyfed.errors import MessageError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (7,), (2, 3)]


def same(a: Message, b: Message) -> bool:
    """Names, shapes, dtypes and bits."""

    def bits(t: Tensor) -> bytes:
        return t.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return a.tensors.keys() == b.tensors.keys() and all(
        TensorSpec.of(a.tensors[n]) == TensorSpec.of(b.tensors[n])
        and bits(a.tensors[n]) == bits(b.tensors[n])
        for n in a.tensors
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_and_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    message = Message({"a.weight": values, "count": torch.tensor(3)})
    assert message.nbytes == values.numel() * torch.empty(0, dtype=dtype).element_size() + 8
    back = Message.from_bytes(message.to_bytes())
    assert same(back, message)
    back.check({"a.weight": TensorSpec(shape, dtype), "count": TensorSpec((), torch.int64)})


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
            st.lists(st.integers(0, 4), max_size=3),
            st.integers(0, 2**31),
        ),
        max_size=4,
    )
)
def test_any_message_comes_back(content: dict[str, tuple[torch.dtype, list[int], int]]) -> None:
    tensors = {
        name: torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for name, (dtype, shape, seed) in content.items()
    }
    message = Message(tensors)
    assert same(Message.from_bytes(message.to_bytes()), message)


def test_views_strides_gradients_and_shared_memory_travel() -> None:
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    message = Message({"t": whole.T, "row": whole[1], "all": whole, "again": whole})
    back = Message.from_bytes(message.to_bytes()).tensors
    assert torch.equal(back["t"], whole.detach().T)
    assert torch.equal(back["row"], whole.detach()[1])
    assert torch.equal(back["again"], whole.detach())
    assert not back["all"].requires_grad


def header(content: object, body: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + body


GOOD = Message({"a": torch.arange(8.0)}).to_bytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 8,
        bytes(range(256)),
        GOOD[:-1],
        GOOD[:7],
        GOOD + b"x",
        pickle.dumps({"a": torch.arange(8.0)}),
        struct.pack("<Q", 2**62) + b"{}",
        header([]),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, b"\0" * 8),
        header({"a": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}}, b"\0" * 16),
        header({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4),
        header({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"\0" * 2),
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, b"\0" * 8),
    ],
)  # fmt: skip
def test_bytes_that_are_refused(raw: bytes) -> None:
    with pytest.raises(MessageError, match=rf"these {len(raw)} bytes are not a message"):
        Message.from_bytes(raw).check({})


@given(st.binary(max_size=200), st.integers(0, len(GOOD) - 1))
def test_no_bytes_do_anything_but_raise_message_error(noise: bytes, at: int) -> None:
    for raw in (noise, GOOD[:at] + noise + GOOD[at + len(noise) :]):
        try:
            Message.from_bytes(raw).check({"a": TensorSpec((8,))})
        except MessageError:
            continue
        assert raw[:8] == GOOD[:8]


SPEC = {"w": TensorSpec((2, 3)), "n": TensorSpec((), torch.int64)}
W, N = torch.zeros(2, 3), torch.tensor(5)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": W}, "tensors missing: n; not announced: none"),
        ({"w": W, "n": N, "z": N, "y": N}, "tensors missing: none; not announced: y, z"),
        ({}, "tensors missing: n, w; not announced: none"),
        ({"w": W.T, "n": N}, r"'w' is float32\[3, 2\], expected float32\[2, 3\]"),
        ({"w": W, "n": N[None]}, r"'n' is int64\[1\], expected int64\[\]"),
        ({"w": W.double(), "n": N}, r"'w' is float64\[2, 3\], expected float32\[2, 3\]"),
        ({"w": W / 0, "n": N}, r"NaN or infinity in 'w' \(6 of 6 values\)"),
        ({"w": W.index_fill(0, torch.tensor(1), torch.inf), "n": N}, r"in 'w' \(3 of 6 values\)"),
    ],
)
def test_check_refuses_what_was_not_announced(tensors: dict[str, Tensor], text: str) -> None:
    with pytest.raises(MessageError, match=text):
        Message(tensors).check(SPEC)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_takes_every_finite_dtype(dtype: torch.dtype) -> None:
    Message({"w": torch.ones(2).to(dtype)}).check({"w": TensorSpec((2,), dtype)})
    Message({}).check({})


def test_a_value_below_the_least_announced_is_refused() -> None:
    spec = {"num_examples": TensorSpec((), torch.int64, least=1)}
    Message({"num_examples": torch.tensor(1)}).check(spec)
    for count in (0, -5):
        with pytest.raises(MessageError, match=f"holds {count}, expected at least 1"):
            Message({"num_examples": torch.tensor(count)}).check(spec)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_many_messages_are_looked_at_at_once(bad: float) -> None:
    big = torch.full((2,), 3e38)  # finite, but their sum is not
    good = Message({"a": torch.ones(3), "n": torch.tensor(4)})
    messages = [good, Message({"a": big}), Message({"a": torch.ones(2), "b": torch.tensor([bad])})]
    messages += [Message({"n": torch.tensor(1)}), Message({}), Message({"a": torch.ones(1).half()})]
    look_at(messages)
    assert "_not_finite" in good.__dict__
    for i, message in enumerate(messages):
        expected = {name: TensorSpec.of(t) for name, t in message.tensors.items()}
        if i == 2:
            with pytest.raises(MessageError, match="NaN or infinity in 'b' \\(1 of 1 values\\)"):
                message.check(expected)
        else:
            message.check(expected)


def test_complex_numbers_are_looked_at_one_by_one() -> None:
    message = Message({"a": torch.ones(2), "c": torch.tensor([complex("nan")])})
    look_at([message])
    with pytest.raises(MessageError, match="'c'"):
        message.check({name: TensorSpec.of(t) for name, t in message.tensors.items()})


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_what_is_about_a_topic(value: float) -> None:
    whole = Message({"fr": torch.ones(2), "fr/count": torch.tensor(3), "global": torch.ones(1)})
    bad = Message({"fr": torch.tensor([value]), "global": torch.ones(1)})
    look_at([whole, bad])
    assert whole.about("") is whole
    assert list(whole.about("fr").tensors) == ["fr", "fr/count"]
    assert whole.about("fr").tensors["fr"] is whole.tensors["fr"]
    assert "_not_finite" in whole.about("fr").__dict__  # it was looked at
    assert "_not_finite" not in Message(whole.tensors).about("fr").__dict__
    part, spec = bad.about("fr"), {"fr": TensorSpec((1,))}
    if value == value:
        part.check(spec)
    else:
        with pytest.raises(MessageError, match="NaN or infinity in 'fr'"):
            part.check(spec)
        bad.about("global").check({"global": TensorSpec((1,))})
