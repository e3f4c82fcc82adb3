"""How packed the code is, counted with ast and tokenize.

Usage: ``python -m bench.reading [FOLDER ...] [--worst N]``.

Without folders, the command counts those of `LIMITS` and fails if a count is over its limit.
``make lint`` runs it. A commit that removes code lowers the limits.

- A *statement* is every ast statement that is not a docstring. Its own expressions are those of the
  statement itself or of its header (the test of an if, the iterable of a for), not those of
  statements inside it.
- A statement is *packed* where its own expressions hold two or more of: comprehensions, conditional
  expressions, lambdas; *very packed* where three or more. Headers of functions and classes are not
  counted.
- The *branches* of a function are its if, for, while, except, conditional expressions, groups of
  and/or, and each for of a comprehension, without those of functions and classes defined inside it.
- *Tokens* leave out comments, strings and layout.
- A class name has *two meanings* where two modules define a public class of that name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
MOST_BRANCHES = 15

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.BoolOp, ast.comprehension)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.STRING,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
}

# Largest allowed count of each kind per folder.
LIMITS: dict[str, dict[str, float]] = {
    "fastlr": {
        "wide": 0,
        "packed": 2.6,
        "very_packed": 0.1,
        "branchy": 2,
        "ambiguous": 1,  # LocalRedundancyCallback, of two frameworks
        "tokens": 246_850,
    },
    "kernels": {"wide": 0, "packed": 0.0, "very_packed": 0.0},
    "bench": {"wide": 0, "packed": 3.6, "very_packed": 0.0, "tokens": 46_700},
    "tests": {
        "wide": 0,
        "packed": 8.3,
        "very_packed": 2.6,
        "ambiguous": 0,
        "tokens": 320_700,  # 2,300 of the emulated GPU
    },
}


@dataclasses.dataclass
class Counts:
    """What was counted in a folder.

    Attributes:
        lines: of all files.
        tokens: without comments, strings and layout.
        wide: lines of more than `WIDTH` columns.
        statements: without docstrings.
        packed_statements: those that hold two or more of what packs.
        very_packed_statements: those that hold three or more.
        comprehensions: in all statements.
        conditionals: conditional expressions in all statements.
        branchy_functions: number of branches and place of each function of more than
            `MOST_BRANCHES`.
        packed_by_file: number of packed statements and path of each file.
        classes: public class names, and the modules that define one.
    """

    lines: int = 0
    tokens: int = 0
    wide: int = 0
    statements: int = 0
    packed_statements: int = 0
    very_packed_statements: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    branchy_functions: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    packed_by_file: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    classes: dict[str, set[str]] = dataclasses.field(default_factory=dict)

    @property
    def packed(self) -> float:
        """Packed statements in 1,000."""
        return 1000 * self.packed_statements / self.statements

    @property
    def very_packed(self) -> float:
        """Very packed statements in 1,000."""
        return 1000 * self.very_packed_statements / self.statements

    @property
    def branchy(self) -> int:
        """Functions of more than `MOST_BRANCHES` branches."""
        return len(self.branchy_functions)

    @property
    def ambiguous_names(self) -> list[str]:
        """Public class names of two meanings."""
        return sorted(name for name, modules in self.classes.items() if len(modules) > 1)

    @property
    def ambiguous(self) -> int:
        """How many public class names have two meanings."""
        return len(self.ambiguous_names)


def count_folder(folder: Path) -> Counts:
    """Count all Python files below a folder."""
    counts = Counts()
    for path in sorted(folder.rglob("*.py")):
        count_file(path, counts)
    return counts


def count_file(path: Path, counts: Counts) -> None:
    """Add one file to the counts of its folder."""
    source = path.read_text()
    tree = ast.parse(source)
    counts.lines += source.count("\n")
    counts.wide += sum(len(line) > WIDTH for line in source.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        counts.tokens += token.type not in LAYOUT
    packed_before = counts.packed_statements
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and branches(node) > MOST_BRANCHES:
            counts.branchy_functions.append((branches(node), f"{path}:{node.lineno} {node.name}"))
        if isinstance(node, ast.stmt) and not is_docstring(node):
            count_statement(node, counts)
    counts.packed_by_file.append((counts.packed_statements - packed_before, str(path)))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            counts.classes.setdefault(node.name, set()).add(str(path))


def count_statement(statement: ast.stmt, counts: Counts) -> None:
    """Add one statement to the counts."""
    inside = list(own_nodes(statement))
    comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in inside)
    conditionals = sum(isinstance(node, ast.IfExp) for node in inside)
    lambdas = sum(isinstance(node, ast.Lambda) for node in inside)
    counts.statements += 1
    counts.comprehensions += comprehensions
    counts.conditionals += conditionals
    if not isinstance(statement, DEFINITIONS):
        counts.packed_statements += comprehensions + conditionals + lambdas >= 2
        counts.very_packed_statements += comprehensions + conditionals + lambdas >= 3


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement's own expressions."""
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def branches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many branches a function has itself."""
    count = 0
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, DEFINITIONS):
            continue
        count += isinstance(node, BRANCHES)
        waiting += ast.iter_child_nodes(node)
    return count


def is_docstring(node: ast.stmt) -> bool:
    """Return True if a statement is a string alone."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def show(folder: Path, counts: Counts, worst: int) -> None:
    """Print the counts of a folder, its longest functions and its most packed files."""
    size = f"{counts.lines} lines, {counts.tokens} tokens, {counts.statements} statements"
    print(f"{folder.name}: {size}")
    print(f"  lines over {WIDTH} columns: {counts.wide}")
    print(
        f"  packed statements in 1,000: {counts.packed:.1f}, very packed {counts.very_packed:.1f}"
    )
    print(f"  comprehensions in 1,000: {1000 * counts.comprehensions / counts.statements:.1f}")
    print(f"  conditional expressions: {1000 * counts.conditionals / counts.statements:.1f}")
    print(f"  functions over {MOST_BRANCHES} branches: {counts.branchy}")
    print(f"  class names of two meanings: {counts.ambiguous} {' '.join(counts.ambiguous_names)}")
    for branch_count, place in sorted(counts.branchy_functions, reverse=True)[:worst]:
        print(f"    {branch_count} branches {place}")
    for packed_count, place in sorted(counts.packed_by_file, reverse=True)[:worst]:
        print(f"    {packed_count} packed statements {place}")


def over_limits(name: str, counts: Counts) -> Iterator[str]:
    """Yield a sentence for each count of a folder that is over its limit."""
    for measure, limit in LIMITS.get(name, {}).items():
        counted = round(getattr(counts, measure), 1)
        if counted > limit:
            yield f"{name}: {measure} is {counted:,}, its limit {limit:,} (bench/reading.py)"


def main() -> None:
    """Count, print, and fail where a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="instead of those with limits")
    parser.add_argument("--worst", type=int, default=0, help="how many places to name")
    given = parser.parse_args()
    failures: list[str] = []
    for folder in given.folders or [ROOT / name for name in LIMITS]:
        counts = count_folder(folder)
        show(folder, counts, given.worst)
        failures += [] if given.folders else over_limits(folder.name, counts)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
