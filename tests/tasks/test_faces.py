"""CelebA: a tiny folder in the published layout. Images need Pillow; the lists do not."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.errors import ConfigError, DataError
from polyfed.tasks.faces import CelebA, celeba

NAMES = ("5_o_Clock_Shadow", "Bald", "Smiling")
LABELS = [[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
PARTS = [0, 0, 0, 0, 1, 1, 2, 2]


def picture(i: int) -> np.ndarray[Any, Any]:
    """178 x 218: a colour for each quarter of the middle square, white above and below it."""
    x = np.full((218, 178, 3), 255, np.uint8)
    square = x[20:198]
    for k, (rows, columns) in enumerate(
        (r, c) for r in (slice(0, 89), slice(89, 178)) for c in (slice(0, 89), slice(89, 178))
    ):
        square[rows, columns] = (30 * i, 60 * k, 40)
    return x


def write(folder: Path, *, official: bool = False, images: bool = True) -> Path:
    anno, evaluation, pictures = (
        folder / n if official else folder for n in ("Anno", "Eval", "Img")
    )
    for place in (anno, evaluation, pictures / "img_align_celeba"):
        place.mkdir(parents=True, exist_ok=True)
    files = [f"{i + 1:06d}.jpg" for i in range(len(LABELS))]
    rows = [
        f"{file}  {'  '.join(str(2 * v - 1) for v in row)}"
        for file, row in zip(files, LABELS, strict=True)
    ]
    lines = [str(len(files)), " ".join(NAMES) + " ", *rows]
    (anno / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    parts = [f"{file} {part}" for file, part in zip(files, PARTS, strict=True)]
    (evaluation / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
    if images:
        from PIL import Image

        for i, file in enumerate(files):
            path = pictures / "img_align_celeba" / file
            Image.fromarray(picture(i)).save(path, quality=95)
    return folder


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    return write(tmp_path)


def check_colours(x: torch.Tensor, which: list[int]) -> None:
    """Each quarter has its colour, within what JPEG and the edges between colours change."""
    assert x.shape == (len(which), 3, 8, 8)
    for image, i in zip(x, which, strict=True):
        for k, (r, c) in enumerate(((1, 1), (1, 6), (6, 1), (6, 6))):
            got = image[:, r, c].tolist()
            assert got == pytest.approx([30 * i, 60 * k, 40], abs=6)


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("below", ["", "celeba", "CelebA"])
def test_read_back(tmp_path: Path, below: str, official: bool) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    write(tmp_path / below, official=official)
    held = celeba(tmp_path, size=8)
    check_colours(held.x, list(range(8)))
    assert held.x.is_contiguous()
    assert held.names == NAMES
    assert held.labels.tolist() == LABELS
    assert held.part.tolist() == PARTS


def test_every_third(faces: Path) -> None:
    held = celeba(faces, size=8, every=3)
    check_colours(held.x, [0, 3, 6])
    assert held.labels.tolist() == LABELS[::3]
    assert held.part.tolist() == [0, 0, 2]


@pytest.mark.parametrize("apart", [False, True])
def test_nodes(faces: Path, apart: bool) -> None:
    nodes = CelebA(data=faces, size=16, model="cnn", apart=apart).nodes(0)
    assert [n.name for n in nodes] == list(NAMES)
    assert nodes[1].classes == ("not Bald", "Bald")
    for k, node in enumerate(nodes):
        assert node.model(node.data["test"].x).shape == (2, 2)
        y = node.data["test"].y
        assert y is not None
        assert y.tolist() == [row[k] for row in LABELS[6:]]
        if not apart:
            sizes = {name: len(split) for name, split in node.data.items()}
            assert sizes == {"train": 4, "val_es": 1, "val_rb": 1, "test": 2}
            assert node.data["train"].x is nodes[0].data["train"].x
            held = torch.cat([node.data[name].x for name in ("val_es", "val_rb")])
            assert not torch.equal(held[0], held[1])
    if apart:
        assert [len(n.data["train"]) for n in nodes] == [2, 1, 1]
    x = nodes[0].data["train"].x
    assert x.dtype == torch.float32
    assert -1 <= float(x.min()) < float(x.max()) <= 1


def test_quick_is_narrow(faces: Path) -> None:
    """One image of 400 is here the first; the network is a narrow one."""
    nodes = CelebA(data=faces, quick=True).nodes(0)
    assert [len(n.data["train"]) for n in nodes] == [1, 1, 1]
    assert sum(p.numel() for p in nodes[0].model.parameters()) < 200_000


# ---- missing and damaged -------------------------------------------------------------------------


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"needs Pillow. Fix: pip install pillow"):
        celeba(write(tmp_path, images=False))


def test_an_image_that_is_none(faces: Path) -> None:
    (faces / "img_align_celeba" / "000003.jpg").write_bytes(b"no jpeg")
    with pytest.raises(DataError, match=r"000003\.jpg is truncated .*no image that can be read"):
        celeba(faces)


def test_an_image_that_is_missing(faces: Path) -> None:
    (faces / "img_align_celeba" / "000005.jpg").unlink()
    with pytest.raises(DataError, match=r"000005\.jpg is truncated .*No such file"):
        celeba(faces)


def test_no_folder_of_images(tmp_path: Path) -> None:
    (write(tmp_path, images=False) / "img_align_celeba").rmdir()
    with pytest.raises(DataError, match=r"images of CelebA were not found(.|\n)*Img"):
        celeba(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CelebA was not found(.|\n)*list_attr_celeba\.txt"):
        celeba(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "0 rows, expected '' as in its first line"),
        ("2\nA B\n1.jpg 1 -1\n", "1 rows, expected '2' as in its first line"),
        ("1\nA B\n1.jpg 1\n", "row '1.jpg 1', expected a name and 2 times 1 or -1"),
        ("1\nA B\n1.jpg 1 0\n", "row '1.jpg 1 0', expected a name and 2 times 1 or -1"),
        ("<html>\n<p>\n", "0 rows, expected '<html>'"),
    ],
)
def test_damaged_attributes(tmp_path: Path, text: str, says: str) -> None:
    (write(tmp_path, images=False) / "list_attr_celeba.txt").write_text(text)
    with pytest.raises(DataError, match=rf"list_attr_celeba\.txt is truncated .*{says}"):
        celeba(tmp_path)


@pytest.mark.parametrize("row", ["", "000002.jpg 3", "000002.jpg"])
def test_damaged_partition(tmp_path: Path, row: str) -> None:
    path = write(tmp_path, images=False) / "list_eval_partition.txt"
    path.write_text(path.read_text().replace("000002.jpg 0", row))
    with pytest.raises(DataError, match=r"no part for 1 of 8 images, 000002\.jpg for one"):
        celeba(tmp_path)


@pytest.mark.parametrize("values", [{"size": 0}, {"every": 0}])
def test_options_that_cannot_be(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"CelebA\.(size|every) must be >= 1, got 0"):
        CelebA(**values)
