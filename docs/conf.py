"""Settings of Sphinx, and two directives that are written from the code.

The directives are the supported operations and the command line's help.

``python -m sphinx -W --keep-going -b html docs docs/_build`` builds the pages; warnings are errors.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.utils.math.latex2mathml import tex2mathml

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "fastlr"
release = version = version_of("fastlr")
copyright = "the authors of fastlr"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "code"
highlight_language = "python"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = [
    name
    for name in ("lightning", "avalanche", "stable_baselines3", "gymnasium")
    if importlib.util.find_spec(name) is None
]
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_ivar = True, False, True
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["formulas.css"]
html_title = f"fastlr {version}"
html_copy_source = html_show_sourcelink = False


class SupportedOperations(Directive):
    """The table of the registry of rules: node kinds of autograd by what they cover."""

    def run(self) -> list[nodes.Node]:
        """Build the table."""
        from fastlr.ghost.graph.walk import VIEWS
        from fastlr.ghost.norms.rules import DESCRIPTIONS

        about: dict[str, list[str]] = {}
        for kind, text in DESCRIPTIONS.items():
            about.setdefault(text, []).append(_operation(kind))
        rows = [(text, ", ".join(kinds)) for text, kinds in about.items()]
        views = sorted(set(map(_operation, VIEWS)))
        rows.append(("on the way from a parameter to its use: views and casts", ", ".join(views)))
        return [_table(("what", "nodes of autograd"), rows)]


class CommandHelp(Directive):
    """What ``fastlr COMMAND --help`` prints, a section for each command."""

    def run(self) -> list[nodes.Node]:
        """Ask the command line."""
        from typer.main import get_command

        from fastlr.cli.main import app

        sections: list[nodes.Node] = [self.help([])]
        for name, command in sorted(get_command(app).commands.items()):
            for words in [[name, inner] for inner in getattr(command, "commands", [])] or [[name]]:
                title = " ".join(["fastlr", *words])
                section = nodes.section(ids=[nodes.make_id(title)], names=[title])
                section += [nodes.title(title, title), self.help(words)]
                sections.append(section)
        return sections

    def help(self, words: list[str]) -> nodes.Node:
        """The help of one command."""
        from typer.testing import CliRunner

        from fastlr.cli.main import app

        plain = {"COLUMNS": "82", "NO_COLOR": "1", "TERM": "dumb"}
        found = CliRunner().invoke(app, [*words, "--help"], prog_name="fastlr", env=plain)
        if found.exit_code:
            raise self.error(f"fastlr {words} --help failed: {found.output}")
        text = "\n".join(line.rstrip() for line in found.output.splitlines()).strip("\n")
        return nodes.literal_block(text, text, language="text")


def _operation(kind: str) -> str:
    """The operation of a node of autograd: AddmmBackward0 -> Addmm."""
    return re.sub(r"Backward\d*$", "", kind)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    table, group = nodes.table(), nodes.tgroup(cols=len(head))
    table += group
    for width in (2, 3):
        group += nodes.colspec(colwidth=width)
    for part, lines in ((nodes.thead(), [head]), (nodes.tbody(), rows)):
        group += part
        for line in lines:
            row = nodes.row()
            part += row
            for cell in line:
                entry = nodes.entry()
                entry += nodes.paragraph("", cell)
                row += entry
    return table


def _math(translator, node: nodes.Element) -> None:  # noqa: ANN001
    """Write a formula as MathML.

    Browsers show it by themselves: nothing is fetched from anywhere.
    """
    block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


_DOCS = Path(__file__).parent
_INCLUDED = {"README.md": _DOCS / "index.md", "REPRODUCTION.md": _DOCS / "reproduction.md"}
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[\w-]*)?(?=\))")


def _with_links(text: str, folder: Path, page_folder: Path) -> str:
    """Adapt the links of a text in ``folder`` that is shown on a page in ``page_folder``.

    Links to pages lead to their HTML. Other files, such as records, become downloads.
    """

    def adapted(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        if not path.is_file():
            return link[0]
        path = _INCLUDED.get(os.path.relpath(path, _DOCS.parent), path)
        target = os.path.relpath(path, page_folder)
        if _DOCS in path.parents and path.suffix == ".md":
            return target + (link[2] or "")
        return target if path.suffix == ".png" else f"path:{target}"

    return _LINK.sub(adapted, text)


def _source_read(app, docname: str, source: list[str]) -> None:  # noqa: ANN001, ARG001
    folder = (_DOCS / docname).parent
    source[0] = _with_links(source[0], folder, folder)


def _include_read(app, path: Path, parent: str, source: list[str]) -> None:  # noqa: ANN001, ARG001
    source[0] = _with_links(source[0], (_DOCS / path).parent, (_DOCS / parent).parent)


def setup(app) -> None:  # noqa: ANN001
    """Register the directives and the renderer of formulas."""
    app.connect("source-read", _source_read)
    app.connect("include-read", _include_read)
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
    directives.register_directive("supported-operations", SupportedOperations)
    directives.register_directive("command-help", CommandHelp)
