"""Image stores that live on: killed runs, damaged stores, full disks, two runs on a folder."""

import errno
import io
import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

from data_sources import SIZE, content, imagenet, pixels, save
from PIL import Image
from pytest import mark, param, raises
from ranks import fork_server

from fastlr.errors import InputError
from fastlr.experiments.data import ImageStore, prepare


def big_source(root):
    """A source that takes about a second of decoding."""
    files = []
    for i in range(24):
        data = io.BytesIO()
        Image.fromarray(pixels(i, 200, 300)).save(data, "JPEG", quality=90)
        files.append(data.getvalue())
    for c in range(16):
        for split, count in (("train", 20), ("val", 4)):
            for i in range(count):
                path = root / split / f"n{c:02d}" / f"{i:02d}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files[(i * (c + 1) + c) % 24])
    return root


@mark.parametrize("kills", [[(3, 2)], param([(0, 2), (3, 1)], marks=mark.long)])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, kills):
    """Killed when so many classes are done, by so many workers."""
    source = big_source(tmp_path / "source")
    prepare(source, tmp_path / "whole", size=16, workers=1)
    out = tmp_path / "store"
    journal = out / "blocks.jsonl"

    def lines():
        return journal.read_text().count("\n") - 1 if journal.exists() else -1

    for wanted, workers in kills:
        process = fork_server().Process(
            target=prepare, args=(source, out), kwargs={"size": 16, "workers": workers}
        )
        process.start()
        while lines() < wanted and process.is_alive():
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (
            "it had ended before it was killed: make the source larger"
        )
        assert not (out / "index.json").exists()
    kept = lines()
    assert 3 <= kept < 16
    with open(journal, "a") as file:
        file.write('{"name": "n1')  # half a line
    seen = []
    prepare(
        source,
        out,
        size=16,
        workers=1,
        progress=lambda what, done, total: seen.append((what, done)),
    )
    # Nothing is done twice.
    assert next(done for what, done in seen if what == "decoding") == 24 * kept
    assert content(out) == content(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == [".lock", "images.u8", "index.json"]


@mark.parametrize("harm", ["flip", "cut", "delete"])
def test_damage_is_found_and_mended(tmp_path, harm, cli):
    source, out = imagenet(tmp_path / "source"), tmp_path / "store"
    prepare(source, out, size=SIZE, workers=1)
    whole, path = content(out), out / "images.u8"
    if harm == "flip":
        with open(path, "r+b") as file:
            file.seek(7 * SIZE * SIZE * 3 + 5)  # in the second class
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
        store = ImageStore.open(out)
        assert store.damaged() == ["n1"]
        store.load([0])
        with raises(
            InputError,
            match="the images of class n1 in .* are damaged: run fastlr data prepare again",
        ):
            store.load([0, 1], "test")
    elif harm == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    cli(f"data info {out} --check", code=1 if harm == "flip" else 2, says="prepare again")
    prepare(source, out, size=SIZE, workers=1)
    cli(f"data info {out} --check")
    assert content(out) == whole


def test_rerun_of_a_finished_store_decodes_nothing(tmp_path):
    source, out = imagenet(tmp_path / "source"), tmp_path / "store"
    prepare(source, out, size=SIZE, workers=1)
    before = content(out)
    changed = (out / "images.u8").stat().st_mtime_ns
    seen = []
    prepare(source, out, size=SIZE, workers=1, progress=lambda what, done, total: seen.append(what))
    assert set(seen) == {"checking"}
    assert content(out) == before
    assert (out / "images.u8").stat().st_mtime_ns == changed


def test_other_settings_or_files_are_refused(tmp_path):
    source, out = imagenet(tmp_path / "source"), tmp_path / "store"
    prepare(source, out, size=SIZE, workers=1)
    with raises(InputError, match="made with size 8, not 9"):
        prepare(source, out, size=9, workers=1)
    save(source / "train/n0/9.png", pixels(9))
    with raises(InputError, match="made with listed 18, not 19"):
        prepare(source, out, size=SIZE, workers=1)
    (source / "train/n0/0.png").unlink()
    with raises(InputError, match="other files of the source"):
        prepare(source, out, size=SIZE, workers=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    with raises(InputError, match="something else"):
        prepare(source, tmp_path / "full", size=SIZE, workers=1)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    with raises(InputError, match="is no folder"):
        prepare(source, tmp_path / "full" / "thesis.tex", size=SIZE, workers=1)


def test_second_run_is_refused(tmp_path):
    source, out = imagenet(tmp_path / "source"), tmp_path / "store"
    refused = []

    def again(*_):
        with raises(InputError, match=f"is being written by process {os.getpid()} on"):
            prepare(source, out, size=SIZE, workers=1)
        refused.append(True)

    assert prepare(source, out, size=SIZE, workers=1, progress=again).damaged() == []
    assert refused


def test_full_disk(tmp_path, monkeypatch, cli):
    source, out = imagenet(tmp_path / "source"), tmp_path / "store"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with raises(OSError, match="images.u8 needs 0.00 GB .* make room there") as caught:
            prepare(source, out, size=SIZE, workers=1)
        assert caught.value.errno == errno.ENOSPC
    with monkeypatch.context() as patch:
        patch.setitem(prepare.__globals__, "write_class", full)
        cli(f"data prepare {source} {out} --size 8 --workers 1", code=1, says="make room")
    assert prepare(source, out, size=SIZE, workers=1).damaged() == []


def test_open_checks(tmp_path):
    out = tmp_path / "store"
    prepare(imagenet(tmp_path / "source"), out, size=SIZE, workers=1)
    text = (out / "index.json").read_text()
    for change, message in (
        ({"version": 9}, "version 9"),
        ({"format": "x"}, "not the index"),
        ({"shape": [19, 8, 8, 3]}, "bytes in place of"),
    ):
        (out / "index.json").write_text(json.dumps({**json.loads(text), **change}))
        with raises(InputError, match=message):
            ImageStore.open(out)
    (out / "index.json").write_text(text[:-30])
    with raises(InputError, match="cannot read"):
        ImageStore.open(out)
    with raises(InputError, match="does not exist"):
        ImageStore.open(tmp_path / "nowhere")
    (out / "index.json").write_text(text)
    store = ImageStore.open(out)
    wrong = (([3], "train"), ([-1], "test"), ([0], "val"), ([], "train"))
    for classes, split in wrong:
        with raises(InputError):
            store.load(classes, split)
    store.load([2])
    os.truncate(out / "images.u8", 100)  # after it was opened, and that class verified
    with raises(InputError, match="has become shorter"):
        store.load([2], "test")
