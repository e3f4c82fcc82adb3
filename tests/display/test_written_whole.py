"""Figures and texts are written whole or not at all."""

import errno
from pathlib import Path

import pytest
from expected import refused

from fastlr.display.figures import save_figure
from fastlr.files import write_text


class Filling:
    """A figure that the disk has no room for."""

    def save(self, path):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("before", [None, b"earlier"])
def test_a_disk_that_fills_leaves_no_partial_figure(tmp_path, before):
    file = tmp_path / "course.png"
    if before:
        file.write_bytes(before)
    with refused(r"course.png: .*No space left on device"):
        save_figure(Filling(), file)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == (
        {file: before} if before else {}
    )


def test_a_figure_takes_a_files_name_not_a_folders(tmp_path):
    class Blank:
        def save(self, path):
            Path(path).write_bytes(b"whole")

    (tmp_path / "folder").mkdir()
    with refused("folder: it is a folder; name a file in it, such as .*folder/figure.png"):
        save_figure(Blank(), tmp_path / "folder")
    assert not (tmp_path / "folder.png").exists()
    assert save_figure(Blank(), tmp_path / "course") == tmp_path / "course.png"
    assert (tmp_path / "course.png").is_file()


def test_a_text_goes_through_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.md").symlink_to(tmp_path / "folder/report.md")
    write_text(tmp_path / "link.md", "whole")
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "folder/report.md").read_text() == "whole"


def test_what_is_no_file_is_written_directly():
    with refused("cannot write /dev/full: No space left on device"):
        write_text("/dev/full", "whole")
