"""Preparing image stores: all layouts, bit for bit; damaged images; sources that cannot be used."""

import io
import json
import re

import numpy as np
import torch
from data_sources import SIZE, content, folder, imagenet, pixels, rows, save
from expected import refused
from PIL import Image
from pytest import mark
from torchvision import transforms

from fastlr.experiments.data import ImageStore, prepare


def test_imagenet_tree(tmp_path):
    source = imagenet(tmp_path / "source")
    store = prepare(source, tmp_path / "store", size=SIZE, workers=1)
    assert store.classes == ["n0", "n1", "n2"]
    assert store.index["plan"]["kind"] == "imagenet"
    assert store.images.shape == (18, SIZE, SIZE, 3)
    for c in range(3):
        assert np.array_equal(
            rows(store, c, "train"), np.stack([pixels(1000 * c + i) for i in range(4)])
        )
        assert np.array_equal(
            rows(store, c, "test"), np.stack([pixels(1000 * c + 100 + i) for i in range(2)])
        )
    images, labels = store.load([2, 0], "train")
    assert images.shape == (8, 3, SIZE, SIZE)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(images[5].permute(1, 2, 0).numpy(), pixels(1))


def test_imagenet_without_val_holds_out(tmp_path):
    store = prepare(
        imagenet(tmp_path / "source", train=10, val=0), tmp_path / "store", size=SIZE, workers=1
    )
    assert store.index["images"] == {"train": 24, "test": 6, "left_out": 0}
    assert store.index["plan"]["test_fraction"] == 0.2


def test_folder_holds_out_by_seed(tmp_path):
    source = folder(tmp_path / "source")
    (source / "README.txt").write_text("of no class")
    one = prepare(source, tmp_path / "one", size=SIZE, workers=1, test_fraction=0.3)
    for c in range(3):
        train, test = rows(one, c, "train"), rows(one, c, "test")
        assert len(train) == 7
        assert len(test) == 3
        whole = {pixels(1000 * c + i).tobytes() for i in range(10)}
        assert {image.tobytes() for image in (*train, *test)} == whole
    tests = {image.tobytes() for image in rows(one, 0, "test")}
    held_out = [i for i in range(10) if pixels(i).tobytes() in tests]
    assert held_out == [5, 6, 9]  # on every machine
    assert one.index["plan"]["seed"] == 0
    assert one.index["plan"]["ignored"] == {"the source's folder: in no class": 1}
    limited = prepare(
        source,
        tmp_path / "two",
        size=SIZE,
        workers=1,
        test_fraction=0.3,
        limit_classes=["c2", "c1"],
    )
    assert limited.classes == ["c1", "c2"]
    # Whatever other classes are there.
    assert np.array_equal(rows(limited, 1, "test"), rows(one, 2, "test"))
    other = prepare(source, tmp_path / "other", size=SIZE, workers=1, test_fraction=0.3, seed=1)
    assert not np.array_equal(rows(other, 0, "test"), rows(one, 0, "test"))


def test_npy_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    arrays = {
        name: np.random.default_rng(name).integers(0, 256, (7, 3, 6, 6), dtype=np.uint8)
        for name in (0, 2, 10)
    }
    for name, array in arrays.items():
        np.save(source / f"{name}.npy", array if name else np.asfortranarray(array))
    store = prepare(source, tmp_path / "store", npy_train=5, workers=1)
    assert store.classes == ["0", "2", "10"] and store.size == 6  # by number; the arrays' own size
    for c, array in enumerate(arrays.values()):
        assert np.array_equal(rows(store, c, "train").transpose(0, 3, 1, 2), array[:5])
        assert np.array_equal(store.load([c], "test")[0].numpy(), array[5:])
    resized = prepare(source, tmp_path / "resized", npy_train=5, size=4, workers=1)
    wanted = Image.fromarray(arrays[2][0].transpose(1, 2, 0).copy()).resize(
        (4, 4), Image.Resampling.BILINEAR
    )
    assert np.array_equal(rows(resized, 1, "train")[0], np.asarray(wanted))


@mark.parametrize("resize", ["squash", "crop"])
def test_resize_is_torchvisions(tmp_path, resize):
    shapes = [(8, 8), (8, 13), (29, 8), (31, 47), (120, 33), (5, 7), (3, 40)]
    crop = transforms.Compose([transforms.Resize(SIZE), transforms.CenterCrop(SIZE)])
    rule = crop if resize == "crop" else transforms.Resize((SIZE, SIZE))
    for i, (height, width) in enumerate(shapes):
        save(tmp_path / "source/train/a" / f"{i}.png", pixels(i, height, width))
        save(tmp_path / "source/val/a" / f"{i}.jpg", pixels(i, height, width), quality=80)
    save(tmp_path / "source/train/b/0.png", pixels(0))
    save(tmp_path / "source/val/b/0.png", pixels(0))
    store = prepare(tmp_path / "source", tmp_path / "store", size=SIZE, workers=1, resize=resize)
    for i, (height, width) in enumerate(shapes):
        assert np.array_equal(
            rows(store, 0, "train")[i], np.asarray(rule(Image.fromarray(pixels(i, height, width))))
        )
        with Image.open(tmp_path / "source/val/a" / f"{i}.jpg") as image:
            assert np.array_equal(rows(store, 0, "test")[i], np.asarray(rule(image)))
    assert np.array_equal(rows(store, 0, "train")[0], pixels(0))  # it had the size


def test_colour_modes(tmp_path):
    grey = pixels(1)[..., 0]
    images = {
        "0.png": (Image.fromarray(grey), np.repeat(grey[..., None], 3, 2)),
        "1.png": (
            Image.fromarray(grey.astype(np.uint16) * 256 + 17),
            np.repeat(grey[..., None], 3, 2),
        ),  # 16 bits
        "2.png": (
            Image.fromarray(np.dstack([pixels(2), grey])),
            pixels(2),
        ),  # RGBA: alpha is dropped
        "3.gif": (Image.fromarray(grey), np.repeat(grey[..., None], 3, 2)),  # palette
    }
    for name, (image, _) in images.items():
        save(tmp_path / "source/train/a" / name, image)
    for path in ("train/b/0.png", "val/a/0.png", "val/b/0.png"):
        save(tmp_path / "source" / path, pixels(0))
    store = prepare(tmp_path / "source", tmp_path / "store", size=SIZE, workers=1)
    assert np.array_equal(
        rows(store, 0, "train"), np.stack([wanted for _, wanted in images.values()])
    )


@mark.parametrize("workers", [1, 2])
def test_corrupt_images_are_left_out(tmp_path, workers, cli):
    source = imagenet(tmp_path / "source")
    jpeg = io.BytesIO()
    Image.fromarray(pixels(0, 40, 40)).save(jpeg, "JPEG")
    bad = {"1.png": b"", "2.jpg": jpeg.getvalue()[:700], "3.png": b"no image at all" * 9}
    for name, data in bad.items():
        (source / "train/n1" / name).write_bytes(data)
    shown = cli(f"data prepare {source} {tmp_path / 'store'} --size 8 --workers {workers}").out
    store = ImageStore.open(tmp_path / "store")
    assert "left out: 3 corrupt images" in shown
    left_out = {
        item["file"]: item for entry in store.index["classes"] for item in entry["left_out"]
    }
    wanted = {f"train/n1/{name}" for name in bad}
    assert set(left_out) == wanted
    assert all(name in shown for name in wanted)
    assert all(item["reason"] for item in left_out.values())
    assert store.index["images"]["left_out"] == len(wanted)
    good = np.stack([pixels(1000), pixels(1002)])  # they move up, the rest of the block is zero
    assert np.array_equal(rows(store, 1, "train"), good)
    first = store.range(1, "test")[1]
    assert not store.images[first : store.range(2, "train")[0]].any()
    assert store.damaged() == []


def test_workers_do_not_matter(tmp_path):
    source = imagenet(tmp_path / "source", classes=5)
    for workers in (1, 3):
        seen = []
        report = lambda *now, seen=seen: seen.append(now)  # noqa: E731
        prepare(source, tmp_path / str(workers), size=5, workers=workers, progress=report)
        assert seen[0] == ("decoding", 0, 30)
        assert seen[-1] == ("decoding", 30, 30)
    assert content(tmp_path / "1") == content(tmp_path / "3")


def npy_folder(root, **arrays):
    root.mkdir()
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array, allow_pickle=True)
    return root


BYTES = np.zeros((7, 3, 4, 4), np.uint8)
BROKEN_SOURCES = {
    "is no folder": (lambda root: root, {}),
    "holds no files": (lambda root: root.mkdir() or root, {}),
    "is no folder: .* unpack": (lambda root: root.write_text("text") and root, {}),
    "none of the layouts": (
        lambda root: root.mkdir() or (root / "a.csv").write_text("1") and root,
        {},
    ),
    "n9 of .* is empty": (lambda root: (imagenet(root) / "train/n9").mkdir() or root, {}),
    "n9 of .* has no images in val": (
        lambda root: save(imagenet(root) / "train/n9/0.png", pixels(0)) or root,
        {},
    ),
    "no folder named like": (
        lambda root: save(imagenet(root, val=0) / "val/0.png", pixels(0)) or root,
        {},
    ),
    "a task needs two": (lambda root: imagenet(root, classes=1), {}),
    "has one image": (lambda root: folder(root, count=1), {}),
    "has 3 classes": (lambda root: imagenet(root), {"limit_classes": 4}),
    "no class zebra": (lambda root: imagenet(root), {"limit_classes": ["n0", "zebra"]}),
    "names n0 twice": (lambda root: imagenet(root), {"limit_classes": ["n0", "n0"]}),
    "two classes of the name é": (
        lambda root: (
            [
                folder(root),
                save(root / "é/0.png", pixels(0)),
                save(root / "e\u0301/0.png", pixels(0)),
            ]
            and root
        ),
        {},
    ),
    "float64": (lambda root: npy_folder(root, a=BYTES, b=BYTES.astype(float)), {"npy_train": 5}),
    r"b.npy .* has shape \[6": (
        lambda root: npy_folder(root, a=BYTES, b=BYTES[:6]),
        {"npy_train": 5},
    ),
    r"is uint8 \[7, 4, 4, 3\]": (
        lambda root: npy_folder(root, a=BYTES.transpose(0, 2, 3, 1), b=BYTES),
        {"npy_train": 5},
    ),
    "--npy-train": (lambda root: npy_folder(root, a=BYTES, b=BYTES), {}),
    "a.npy .* is no whole .npy": (
        lambda root: npy_folder(root, a=np.array([{}]), b=BYTES),
        {"npy_train": 5},
    ),
    "is no whole .npy": (
        lambda root: (
            npy_folder(root, a=BYTES, b=BYTES)
            and (root / "b.npy").write_bytes((root / "a.npy").read_bytes()[:-9])
            and root
        ),
        {"npy_train": 5},
    ),
    "b.npy .* is no whole .npy file": (
        lambda root: npy_folder(root, a=BYTES) and (root / "b.npy").write_bytes(b"") or root,
        {"npy_train": 5},
    ),
    "source/c1/up and .*/source are one folder": (
        lambda root: (folder(root) / "c1/up").symlink_to(root) or root,
        {},
    ),
    "source/train and .*/source/again are one folder": (
        lambda root: (imagenet(root, val=0) / "again").symlink_to(root / "train") or root,
        {},
    ),
    "format pictures": (lambda root: imagenet(root), {"format": "pictures"}),
    "lies in the source": (lambda root: imagenet(root), {"out": "source/store"}),
    "size 0": (lambda root: imagenet(root), {"size": 0}),
    "workers must": (lambda root: imagenet(root), {"workers": 0}),
}


@mark.parametrize("message", BROKEN_SOURCES)
def test_broken_sources(tmp_path, message):
    make, options = BROKEN_SOURCES[message]
    out = tmp_path / options.get("out", "store")
    with refused(message):
        prepare(make(tmp_path / "source"), **{"workers": 1, **options, "out": out})
    assert not (out / "index.json").exists()


def test_a_class_of_corrupt_images_only(tmp_path):
    source = imagenet(tmp_path / "source")
    for path in (source / "val/n1").iterdir():
        path.write_bytes(b"")
    with refused("n1 .*all its images for test are corrupt .*val/n1/0.png"):
        prepare(source, tmp_path / "store", size=SIZE, workers=1)
    with refused("unfinished"):
        ImageStore.open(tmp_path / "store")


def test_a_lost_file_is_not_a_corrupt_image(tmp_path, monkeypatch):
    source = imagenet(tmp_path / "source")
    scan = prepare.__globals__["scan"]

    def then_remove(*arguments, **options):
        layout = scan(*arguments, **options)
        (source / "train/n1/0.png").unlink(missing_ok=True)
        return layout

    monkeypatch.setitem(prepare.__globals__, "scan", then_remove)
    for workers in (1, 2):
        save(source / "train/n1/0.png", pixels(1000))
        with refused("cannot read train/n1/0.png .*goes on from there"):
            prepare(source, tmp_path / "store", size=SIZE, workers=workers)


def test_info(tmp_path, cli):
    prepare(imagenet(tmp_path / "source"), tmp_path / "store", size=SIZE, workers=1)
    shown = cli(f"data info {tmp_path / 'store'}").out
    assert "12 train, 6 test" in shown
    assert "n0, n1, n2" in shown


def test_images_are_squashed_or_cropped_and_a_store_keeps_its_own(tmp_path, cli):
    source = imagenet(tmp_path / "source")
    save(source / "train/n0/0.png", pixels(7, 16, 40))
    stores = {
        how: prepare(source, tmp_path / str(how), size=SIZE, workers=1, resize=how)
        for how in (None, "crop")
    }
    squashed = Image.fromarray(pixels(7, 16, 40)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    assert np.array_equal(rows(stores[None], 0, "train")[0], np.asarray(squashed)), (
        "as in the paper"
    )
    assert [store.resize for store in stores.values()] == ["squash", "crop"]
    whole = content(tmp_path / "crop")
    path = tmp_path / "crop" / "index.json"
    assert "centre crop" in stores["crop"].index["plan"]["rule"]
    index = json.loads(path.read_text())
    for plan in (
        index["plan"],
        {key: value for key, value in index["plan"].items() if key != "resize"},
    ):
        # The second: as fastlr wrote them before there was a choice.
        path.write_text(json.dumps({**index, "plan": plan}))
        again = prepare(source, tmp_path / "crop", size=SIZE, workers=1)
        assert again.resize == "crop"
        assert (again.path / "images.u8").read_bytes() == whole[0]
        with refused("made with resize crop, not squash: choose another folder"):
            prepare(source, tmp_path / "crop", size=SIZE, workers=1, resize="squash")
    with refused("resize stretch: choose one of squash, crop"):
        prepare(source, tmp_path / "new", size=SIZE, workers=1, resize="stretch")
    assert re.search(r"resized by +crop", cli(f"data info {tmp_path / 'crop'}").out)
