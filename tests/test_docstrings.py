"""What a public docstring owes its reader beyond being there, which ruff's D rules look after."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("ntp", "launcher/ntp_launcher", "kernels/ntp_kernels")


def public(node: ast.AST, context: str = "") -> Iterator[tuple[ast.FunctionDef, str]]:
    """Public functions and what they say, the class around them included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            said = context + (ast.get_docstring(child) or "")
            if isinstance(child, ast.ClassDef):
                yield from public(child, said)
            else:
                yield child, said


def raised(function: ast.FunctionDef) -> set[str]:
    """Names of the errors that the body raises by name; an `assert` is nobody's contract."""
    calls = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise))
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return {name for name in names if name != "AssertionError"}


def test_a_public_function_names_the_errors_that_it_raises() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name} raises {error}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for function, said in public(ast.parse(path.read_text(encoding="utf-8")))
        for error in sorted(raised(function))
        if error not in said
    ]
    assert silent == []
