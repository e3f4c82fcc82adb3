"""``fastlr data prepare`` and ``fastlr data info``: image stores for ``fastlr continual``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fastlr.cli.commands import Command, CommandGroup
from fastlr.display.record import count_bars, counted
from fastlr.errors import FastlrError, few

if TYPE_CHECKING:
    from fastlr.experiments.data import ImageStore

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Prepare an image store from a folder, or look into one.",
)
_SHOWN = 10  # left-out images that are named on the screen; the index names all


@app.command(cls=Command)
def prepare(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of images: train/<class>/*.JPEG, <class>/*.png or <class>.npy."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(help="Folder of the store; an interrupted one is continued.")
    ],
    size: Annotated[
        int | None,
        typer.Option(
            help="Height and width of the stored images; default: 64, or their own for .npy files."
        ),
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(
            help="Way of resizing: squash (both sides, as in the paper) or crop (the shorter side, "
            "then the centre); default: squash, or that of a store that exists."
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option("--format", help="Layout of SOURCE: auto, imagenet, folder or npy.")
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="Number of decoding threads; default: one per core.")
    ] = None,
    limit_classes: Annotated[
        str | None, typer.Option(help="Classes to take: a number, or names separated by commas.")
    ] = None,
    test_fraction: Annotated[
        float, typer.Option(help="Share of each class to hold out where SOURCE has no split.")
    ] = 0.2,
    npy_train: Annotated[
        int, typer.Option(help="Number of training images of each .npy file, from the first.")
    ] = 600,
    seed: Annotated[int, typer.Option(help="Seed of the held-out images.")] = 0,
) -> None:
    """Turn SOURCE into one memory-mapped store of uint8 images, in OUT.

    Run it again to continue, check or repair the store.
    """
    from fastlr.experiments.data import prepare as make

    with count_bars() as progress:
        store = make(
            source,
            out,
            size=size,
            resize=resize,
            format=layout,
            workers=workers,
            limit_classes=_limit(limit_classes),
            test_fraction=test_fraction,
            npy_train=npy_train,
            seed=seed,
            progress=progress,
        )
    _print_summary(store)


@app.command(cls=Command)
def info(
    store: Annotated[Path, typer.Argument(help="Folder of a store.")],
    check: Annotated[
        bool, typer.Option("--check", help="Read everything and compare the checksums.")
    ] = False,
) -> None:
    """Show what is in STORE."""
    from fastlr.experiments.data import ImageStore
    from fastlr.experiments.data.prepare import counter

    opened = ImageStore.open(store)
    _print_summary(opened)
    if check:
        with count_bars() as progress:
            damaged = opened.damaged(counter(progress, "checking", opened.index["shape"][0]))
        if damaged:
            raise FastlrError(
                f"{store}: the checksum fails for {len(damaged)} of {len(opened.classes)} classes "
                f"({few(damaged, _SHOWN)}): run fastlr data prepare again with the same source, "
                "which mends them"
            )
        print(f"checksums: all {len(opened.classes)} classes are intact")


def _limit(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_summary(store: ImageStore) -> None:
    index, classes = store.index, store.classes
    plan, images = index["plan"], index["images"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "store": str(store.path),
        "source": f"{plan['source']} ({plan['kind']})",
        "images": f"{images['train']:,} train, {images['test']:,} test, "
        f"{store.size} x {store.size}, "
        f"{index['shape'][0] * store.size**2 * 3 / 1e6:,.1f} MB",
        "classes": f"{len(classes)} ({few(classes)}); "
        f"{_per_class(store, 'train')} train, {_per_class(store, 'test')} test each",
        "digest": store.digest,
    }
    if store.resize is not None:
        rows["resized by"] = store.resize
    if plan.get("test_fraction") is not None:
        rows["test images"] = (
            f"held out of each class: {plan['test_fraction']:g}, seed {plan['seed']}"
        )
    if plan.get("ignored"):
        rows["not used"] = "; ".join(
            f"{counted(count, 'file')} ({reason})" for reason, count in plan["ignored"].items()
        )
    for name, text in rows.items():
        table.add_row(name, _printable(text))
    Console().print(table, highlight=False, markup=False, soft_wrap=False)
    left_out = [item for entry in index["classes"] for item in entry["left_out"]]
    if left_out:
        print(f"left out: {counted(len(left_out), 'corrupt image')}")
        for item in left_out[:_SHOWN]:
            print(_printable(f"  {item['file']}: {item['reason']}"))
        if len(left_out) > _SHOWN:
            print(f"  and {len(left_out) - _SHOWN} more, all named in {store.path}/index.json")


def _per_class(store: ImageStore, split: str) -> str:
    """Return the number of images of a class, or the least and the greatest."""
    ranges = [store.range(i, split) for i in range(len(store.classes))]
    counts = sorted({stop - start for start, stop in ranges})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _printable(text: str) -> str:
    """Return a file's name, which need not be text, as text."""
    return text.encode("utf-8", "backslashreplace").decode()
