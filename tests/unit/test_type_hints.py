"""Public functions say what they take and give."""

import ast
from pathlib import Path

import pytest

import mixtape_plugin

PACKAGE = Path(mixtape_plugin.__file__).parent
FILES = sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "scripts").glob("*.py")])


def public_functions(body, prefix=""):
    """Functions of a module, and methods of its public classes: (name, node), without nested ones."""
    for node in body:
        if getattr(node, "name", "_").startswith("_") and getattr(node, "name", "") != "__init__":
            continue
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node.body, f"{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node


def missing_hints(function, is_method):
    """Names of the parameters without a type, and "return". ``*args`` and ``**kwargs`` need none.

    Nor does a Triton kernel, whose hints are instructions to its compiler.
    """
    decorators = [ast.dump(decorator) for decorator in function.decorator_list]
    if any("id='triton'" in decorator and "attr='jit'" in decorator for decorator in decorators):
        return []
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args]
    if is_method and not any("id='staticmethod'" in decorator for decorator in decorators):
        parameters = parameters[1:]  # self or cls
    missing = [parameter.arg for parameter in [*parameters, *arguments.kwonlyargs] if parameter.annotation is None]
    return missing + ["return"] * (function.returns is None and function.name != "__init__")


def problems(source):
    for name, function in public_functions(ast.parse(source).body):
        missing = missing_hints(function, is_method="." in name)
        if missing:
            yield f"{name}: {', '.join(missing)}"


def test_what_is_missing_is_found():
    source = """
def bare(a, b: int = 1, *args, c, **kwargs): ...
@triton.jit
def kernel(a, size: tl.constexpr): ...
def typed(a: int) -> int:
    def nested(x): ...
def _private(a): ...
class Public:
    def __init__(self, a): ...
    def method(self, a: int): ...
    @classmethod
    def made(cls, a: int) -> "Public": ...
    @staticmethod
    def static(a) -> None: ...
    def _private(self, a): ...
class _Private:
    def method(self, a): ...
"""
    expected = ["bare: a, c, return", "Public.__init__: a", "Public.method: return", "Public.static: a"]
    assert list(problems(source)) == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_public_functions_have_type_hints(path):
    assert list(problems(path.read_text(encoding="utf-8"))) == []
