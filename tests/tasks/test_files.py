"""Every layout is written here byte by byte, with a formula for each pixel, and read back."""

import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.errors import DataError
from polyfed.tasks import files

BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"]
BATCHES.append("test_batch")


def pixel(i: int, c: int, row: int, column: int) -> int:
    """Different along every axis, so that a swapped axis shows."""
    return (101 * i + 67 * c + 5 * row + 3 * column + row * column) % 256


def pictures(first: int, n: int, channels: int, size: int) -> np.ndarray[Any, Any]:
    x = np.zeros((n, channels, size, size), np.uint8)
    for i, c, row, column in np.ndindex(x.shape):
        x[i, c, row, column] = pixel(first + i, c, row, column)
    return x


def check_pixels(x: torch.Tensor) -> None:
    for i, c, row, column in [(0, 0, 0, 0), (1, 0, 2, 5), (3, x.shape[1] - 1, 5, 2)]:
        assert int(x[i, c, row, column]) == pixel(i, c, row, column)
    np.testing.assert_array_equal(x.numpy(), pictures(0, len(x), x.shape[1], x.shape[2]))


# ---- writers of tiny files -----------------------------------------------------------------------


def write_cifar_binary(folder: Path, each: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for b, name in enumerate(BATCHES):
        raw = b""
        for i, x in enumerate(pictures(b * each, each, 3, 32)):
            red, green, blue = x
            raw += bytes([(b * each + i) % 10]) + red.tobytes() + green.tobytes() + blue.tobytes()
        (folder / f"{name}.bin").write_bytes(raw)
    return folder


class Python2(pickle._Pickler):
    """Writes bytes as Python 2 wrote str, which is how the published batches are written."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_str(self, value: bytes) -> None:
        short = len(value) < 256
        head = b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        self.write(head + value)
        self.memoize(value)

    dispatch[bytes] = save_str


def python2(value: object) -> bytes:
    out = io.BytesIO()
    Python2(out, protocol=2).dump(value)
    return out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_batch(b: int, each: int) -> dict[bytes, object]:
    return {
        b"batch_label": b"training batch 1 of 5",
        b"labels": [(b * each + i) % 10 for i in range(each)],
        b"data": pictures(b * each, each, 3, 32).reshape(each, 3072),
        b"filenames": [b"a.png"] * each,
    }


def write_cifar_python(
    folder: Path, dump: Callable[[object], bytes] = python2, each: int = 2
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for b, name in enumerate(BATCHES):
        (folder / name).write_bytes(dump(cifar_batch(b, each)))
    return folder


def write_svhn_mat(folder: Path) -> Path:
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    labels = np.array([[10], [1], [9], [2], [10]], np.uint8)
    for name, part in (("train", slice(0, 3)), ("test", slice(3, 5))):
        x = np.zeros((32, 32, 3, part.stop - part.start), np.uint8)
        for row, column, c, i in np.ndindex(x.shape):
            x[row, column, c, i] = pixel(part.start + i, c, row, column)
        savemat(folder / f"{name}_32x32.mat", {"X": x, "y": labels[part]}, do_compression=True)
    return folder


def write_svhn_pool(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    x = pictures(0, 4, 3, 32).transpose(0, 2, 3, 1)
    np.savez(
        folder / "svhn_fedlinked_pool.npz",
        x=x,
        y=np.array([0, 3, 9, 1], np.uint8),
        class_totals=np.arange(10) * 3,
    )
    return folder


def idx(a: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()


def write_mnist(folder: Path, *, packed: bool = False, writers: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.array([5, 0, 4, 1, 9], np.uint8)
    for name, first, n in (("train", 0, 3), ("t10k", 3, 2)):
        for what, raw in (
            ("images-idx3", idx(pictures(first, n, 1, 28)[:, 0])),
            ("labels-idx1", idx(labels[first : first + n])),
        ):
            path = folder / f"{name}-{what}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw) if packed else raw)
    if writers:
        np.savez(folder / "writers.npz", train_writer=np.array([7, 7, 3], np.int16))
    return folder


# ---- read back exactly ---------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar_binary(tmp_path: Path, below: str) -> None:
    write_cifar_binary(tmp_path / below)
    images = files.cifar10(tmp_path)
    check_pixels(images.x)
    assert images.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (images.num_train, images.classes[2], images.totals) == (10, "bird", None)


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar_python(tmp_path: Path, below: str) -> None:
    write_cifar_python(tmp_path / below)
    images = files.cifar10(tmp_path)
    check_pixels(images.x)
    assert images.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert images.num_train == 10


def test_cifar_pickled_again_by_python_3(tmp_path: Path) -> None:
    def dump(batch: object) -> bytes:
        assert isinstance(batch, dict)
        return pickle.dumps({k.decode(): v for k, v in batch.items()}, protocol=4)

    check_pixels(files.cifar10(write_cifar_python(tmp_path, dump)).x)


@pytest.mark.parametrize("below", ["", "svhn", "SVHN"])
def test_svhn_mat(tmp_path: Path, below: str) -> None:
    write_svhn_mat(tmp_path / below)
    images = files.svhn(tmp_path)
    check_pixels(images.x)
    assert images.x.is_contiguous()
    assert images.y.tolist() == [0, 1, 9, 2, 0]
    assert (images.num_train, images.totals) == (3, None)


def test_svhn_pool(tmp_path: Path) -> None:
    images = files.svhn(write_svhn_pool(tmp_path))
    check_pixels(images.x)
    assert images.y.tolist() == [0, 3, 9, 1]
    assert images.totals == tuple(range(0, 30, 3))


def test_svhn_prefers_the_complete_set(tmp_path: Path) -> None:
    write_svhn_pool(write_svhn_mat(tmp_path))
    assert files.svhn(tmp_path).totals is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw", "mnist"])
def test_mnist(tmp_path: Path, below: str, packed: bool) -> None:
    write_mnist(tmp_path / below, packed=packed)
    images = files.mnist(tmp_path)
    check_pixels(images.x)
    assert images.x.shape == (5, 1, 28, 28)
    assert images.y.tolist() == [5, 0, 4, 1, 9]
    assert (images.num_train, images.writers) == (3, None)


def test_mnist_writers_are_minus_one_where_unknown(tmp_path: Path) -> None:
    images = files.mnist(write_mnist(tmp_path, writers=True))
    assert images.writers is not None
    assert images.writers.tolist() == [7, 7, 3, -1, -1]


def test_the_folder_may_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write_mnist(tmp_path)))
    assert len(files.mnist(Path("~")).y) == 5


def test_official_split(tmp_path: Path) -> None:
    train, test = files.official_split(files.mnist(write_mnist(tmp_path)))
    assert (train.tolist(), test.tolist()) == ([0, 1, 2], [3, 4])
    with pytest.raises(DataError, match="no official split"):
        files.official_split(files.svhn(write_svhn_pool(tmp_path)))


# ---- nothing there -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (files.cifar10, ["data_batch_1.bin", "cifar-10-batches-py", "https://www.cs.toronto.edu"]),
        (files.svhn, ["train_32x32.mat", "svhn_fedlinked_pool.npz", "ufldl.stanford.edu"]),
        (files.mnist, ["t10k-labels-idx1-ubyte", "MNIST/raw", "yann.lecun.com"]),
    ],
)
def test_missing_files_say_what_where_and_whence(
    tmp_path: Path, read: Callable[[Path], files.Images], texts: list[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            read(folder)
        assert all(text in str(caught.value) for text in [str(folder), *texts])
        assert ("which is not a folder" in str(caught.value)) == (folder != tmp_path)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    (write_mnist(tmp_path / "mnist") / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="mnist lacks t10k-labels-idx1-ubyte\n"):
        files.mnist(tmp_path)


# ---- damaged -------------------------------------------------------------------------------------


def test_truncated_idx_says_got_and_expected_bytes(tmp_path: Path) -> None:
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte .*got 2367 bytes, expected 2368"):
        files.mnist(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\0", b"\0\0\x08", b"\0\0\x08\x03\0\0", b"<html>no</html>"])
def test_no_idx_at_all(tmp_path: Path, raw: bytes) -> None:
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match=f"train-labels-idx1-ubyte .*got {len(raw)} bytes"):
        files.mnist(tmp_path)


def test_labels_where_images_belong(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    raw = (tmp_path / "train-labels-idx1-ubyte").read_bytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match="1 axes and labels of 1, expected 3 and 1"):
        files.mnist(tmp_path)


def test_more_labels_than_images(tmp_path: Path) -> None:
    (write_mnist(tmp_path) / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte .*2 images, expected 3"):
        files.mnist(tmp_path)


def test_test_images_of_another_size(tmp_path: Path) -> None:
    raw = idx(np.zeros((2, 20, 20), np.uint8))
    (write_mnist(tmp_path) / "t10k-images-idx3-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match=r"images of \(20, 20\), expected \(28, 28\)"):
        files.mnist(tmp_path)


def test_impossible_label(tmp_path: Path) -> None:
    raw = idx(np.array([1, 2, 10], np.uint8))
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte .*label 10, expected 0 to 9"):
        files.mnist(tmp_path)


@pytest.mark.parametrize("keep", [5, 40])
def test_truncated_gzip(tmp_path: Path, keep: int) -> None:
    path = write_mnist(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"ubyte\.gz .*got {keep} bytes of gzip"):
        files.mnist(tmp_path)


@pytest.mark.parametrize("short", [{"train_writer": np.zeros(2, int)}, {"train_writer": "abc"}])
def test_writers_that_do_not_fit(tmp_path: Path, short: dict[str, Any]) -> None:
    np.savez(write_mnist(tmp_path) / "writers.npz", **short)
    with pytest.raises(DataError, match=r"writers\.npz .*train_writer .*expected 3 integers"):
        files.mnist(tmp_path)


def test_truncated_cifar_binary(tmp_path: Path) -> None:
    path = write_cifar_binary(tmp_path) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"data_batch_3\.bin .*got 6136 bytes, expected 6146"):
        files.cifar10(tmp_path)


def test_cifar_batch_that_ends_after_a_whole_image(tmp_path: Path) -> None:
    path = write_cifar_binary(tmp_path) / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:3073])
    with pytest.raises(DataError, match=r"test_batch\.bin .*1 images, expected 2"):
        files.cifar10(tmp_path)


def test_empty_cifar_batch(tmp_path: Path) -> None:
    (write_cifar_binary(tmp_path) / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin .*0 bytes, expected 3073"):
        files.cifar10(tmp_path)


@pytest.mark.parametrize("name", ["train_32x32.mat", "test_32x32.mat"])
@pytest.mark.parametrize("keep", [0, 50, 400])
def test_truncated_svhn_mat(tmp_path: Path, name: str, keep: int) -> None:
    path = write_svhn_mat(tmp_path) / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"{name} .*got {keep} bytes, expected \d+ as published"):
        files.svhn(tmp_path)


def test_svhn_labels_out_of_range(tmp_path: Path) -> None:
    from scipy.io import savemat

    x = np.zeros((32, 32, 3, 1), np.uint8)
    savemat(write_svhn_mat(tmp_path) / "test_32x32.mat", {"X": x, "y": np.array([[0]])})
    with pytest.raises(DataError, match=r"labels \[0\], expected 1 to 10"):
        files.svhn(tmp_path)


def test_svhn_with_its_axes_in_another_order(tmp_path: Path) -> None:
    from scipy.io import savemat

    x = np.zeros((5, 32, 32, 3), np.uint8)
    savemat(write_svhn_mat(tmp_path) / "test_32x32.mat", {"X": x, "y": np.ones((5, 1))})
    with pytest.raises(DataError, match=r"expected uint8 \(32, 32, 3, 5\)"):
        files.svhn(tmp_path)


@pytest.mark.parametrize("keep", [0, 30, 5000])
def test_truncated_svhn_pool(tmp_path: Path, keep: int) -> None:
    path = write_svhn_pool(tmp_path) / "svhn_fedlinked_pool.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"pool\.npz .*got {keep} bytes"):
        files.svhn(tmp_path)


def test_npz_with_a_pickle_inside_is_refused(tmp_path: Path) -> None:
    x = np.array([{}], dtype=object)
    np.savez(tmp_path / "svhn_fedlinked_pool.npz", x=x, y=x, class_totals=x)
    with pytest.raises(DataError, match="allow_pickle"):
        files.svhn(tmp_path)


# ---- a pickle that bites -------------------------------------------------------------------------


class Runs:
    """Pickles as a call."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.args


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [os.system, eval, getattr, np.load, np.dtype, bytearray])
def test_a_pickle_cannot_run_anything(
    tmp_path: Path, protocol: int, call: Callable[..., Any]
) -> None:
    touched = tmp_path / "touched"
    text = f"touch {touched}" if call is os.system else f"open({str(touched)!r}, 'w')"
    bad = pickle.dumps({"data": Runs(call, text), "labels": []}, protocol=protocol)
    write_cifar_python(tmp_path, lambda _: bad)
    with pytest.raises(DataError, match=r"data_batch_1 is (refused: its pickle|truncated)"):
        files.cifar10(tmp_path)
    assert not touched.exists()


def test_a_refusal_names_what_was_asked_for(tmp_path: Path) -> None:
    bad = pickle.dumps(Runs(os.system, "true"), protocol=2)
    with pytest.raises(DataError, match=r"asks for posix\.system.*Nothing in it was run"):
        files.cifar10(write_cifar_python(tmp_path, lambda _: bad))


@pytest.mark.parametrize("name", ["numpy.core.multiarray\n_reconstruct", "numpy\ndtype"])
def test_a_pickle_cannot_change_the_stand_ins(tmp_path: Path, name: str) -> None:
    """BUILD on the class itself would set attributes on it, for every file read afterwards."""
    bad = b"\x80\x02c" + name.encode() + b"\n}U\x05valueU\x01xsb."
    with pytest.raises(DataError, match="data_batch_1 is truncated or damaged"):
        files.cifar10(write_cifar_python(tmp_path / "bad", lambda _: bad))
    check_pixels(files.cifar10(write_cifar_python(tmp_path / "good")).x)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({b"data": np.zeros((2, 3072), np.float32)}, "expected plain bytes"),
        ({b"data": np.zeros((3072, 2), np.uint8).T}, "expected plain bytes"),
        ({b"data": np.zeros((2, 3071), np.uint8)}, r"shape \(2, 3071\), expected \(2, 3072\)"),
        ({b"data": [1, 2]}, "no 'data' array"),
        ({b"labels": [0, 10]}, "not one of 0 to 9"),
        ({b"labels": [0, True]}, "not one of 0 to 9"),
        ({b"labels": []}, "expected"),
        ({b"labels": None}, "no 'labels' list"),
    ],
)
def test_pickles_that_are_no_batch(tmp_path: Path, change: dict[bytes, Any], says: str) -> None:
    folder = write_cifar_python(tmp_path, lambda batch: python2({**batch, **change}))  # type: ignore[dict-item]
    with pytest.raises(DataError, match=f"data_batch_1 is truncated or damaged.*{says}"):
        files.cifar10(folder)


@given(keep=st.integers(0, len(python2(cifar_batch(0, 1))) - 1))
def test_a_truncated_pickle_is_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, keep: int
) -> None:
    path = tmp_path_factory.mktemp("cifar") / "data_batch_1"
    path.write_bytes(python2(cifar_batch(0, 1))[:keep])
    with pytest.raises(DataError, match=f"data_batch_1 .*got {keep} bytes"):
        files._cifar_pickled(path)


# ---- the real thing ------------------------------------------------------------------------------


@pytest.fixture
def data() -> Path:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: it names a folder with MNIST, CIFAR-10 and SVHN")
    return Path(os.environ["POLYFED_DATA"])


def present(read: Callable[[Path], files.Images], folder: Path) -> files.Images:
    try:
        return read(folder)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.mark.real_data
def test_real_mnist(data: Path) -> None:
    images = present(files.mnist, data)
    assert images.x.shape == (70_000, 1, 28, 28)
    assert images.num_train == 60_000
    assert images.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert torch.bincount(images.y[:60_000]).tolist() == [
        *(5923, 6742, 5958, 6131, 5842),
        *(5421, 5918, 6265, 5851, 5949),
    ]
    assert images.x[:60_000].double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    if images.writers is not None:
        assert len(set(images.writers[:60_000].tolist())) == 539


@pytest.mark.real_data
def test_real_cifar10(data: Path) -> None:
    images = present(files.cifar10, data)
    assert torch.bincount(images.y).tolist() == [6000] * 10
    mean = images.x[:50_000].double().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


@pytest.mark.real_data
def test_real_svhn(data: Path) -> None:
    images = present(files.svhn, data)
    assert images.x.shape[1:] == (3, 32, 32)
    totals = images.totals or tuple(torch.bincount(images.y).tolist())
    assert sum(totals) == 99_289
