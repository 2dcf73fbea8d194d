"""Digests of the kernels in a folder of sources, which are read and never run: a revision under review isn't trusted.

The digest is that of `kernels.bundle.kernel_digest`: of the jitted functions involved and their global constants. It is resolved
in the syntax trees of kernels/*.py: the registry's tables, each operation's function, the functions it calls, constants made of
numbers and text. Other constructs raise Unreadable with a reason.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...kernels.bundle import normalised_source

REGISTRY = "registry"  # kernels/registry.py, whose tables name each kernel's operation
TABLES = ("TUNABLE", "FIXED")
OUTSIDE = ("triton",)  # packages whose functions aren't part of a digest
MADE_OF = {"Operation": "kernel", "FixedKernel": "operation"}  # constructors, with the argument that leads to the jitted function
CALLS = ("tl.constexpr", "FixedSchedule", "PrefillSchedule", *MADE_OF)  # make objects that aren't part of a digest
OBJECTS = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.ClassDef, ast.Lambda, ast.DictComp, ast.ListComp, ast.Subscript)
ARITHMETIC = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
JITTED = ("triton.jit", "jit", "triton.constexpr_function", "constexpr_function")
Constant = int | float | str | bool


class Unreadable(Exception):
    """Sources that can't be resolved without running them."""


@dataclass(frozen=True)
class Function:
    """A jitted function and its module."""

    module: str
    node: ast.FunctionDef


@dataclass
class Sources:
    """Texts of kernels/*.py by module name, parsed on demand."""

    texts: Mapping[str, str]
    trees: dict[str, dict[str, ast.AST]] = field(default_factory=dict)

    def names(self, module: str) -> dict[str, ast.AST]:
        """Statement or value by name at a module's top level; of several, the last."""
        if module not in self.texts:
            raise Unreadable(f"there is no kernels/{module}.py")
        if module not in self.trees:
            try:
                tree = ast.parse(self.texts[module])
            except (SyntaxError, ValueError, RecursionError) as e:
                raise Unreadable(f"kernels/{module}.py isn't Python: {e}") from None
            self.trees[module] = dict(_bound(tree.body))
        return self.trees[module]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """(module, value) of a name, through imports between files of kernels/; None if it is undefined or from elsewhere."""
        value = self.names(module).get(name)
        if not isinstance(value, ast.ImportFrom):
            return None if value is None or isinstance(value, ast.Import) else (module, value)
        original = next(a.name for a in value.names if (a.asname or a.name) == name)
        if value.level == 1 and value.module and "." not in value.module:
            return self.find(value.module, original)
        return None

    def module_of(self, module: str, name: str) -> str:
        """The file of kernels/ that a name refers to, as in `from . import linear`."""
        value = self.names(module).get(name)
        if isinstance(value, ast.ImportFrom) and value.level == 1 and value.module is None:
            return next(a.name for a in value.names if (a.asname or a.name) == name)
        raise Unreadable(f"kernels/{module}.py: {name} isn't a file of kernels/")


def _bound(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for one in statements:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield one.name, one
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], one) for alias in one.names)
        elif isinstance(one, ast.Assign):
            for target in one.targets:
                yield from _assigned(target, one.value)
        elif isinstance(one, ast.AnnAssign) and one.value and isinstance(one.target, ast.Name):
            yield one.target.id, one.value
        elif isinstance(one, ast.If) and _is_type_checking(one.test):
            continue
        elif not isinstance(one, ast.Expr):  # a loop, a condition, a try: its names can't be resolved without running it
            yield from ((n.id, one) for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts):
            yield from _assigned(one, its)
    else:
        yield from ((n.id, value) for n in ast.walk(target) if isinstance(n, ast.Name))


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def digests(texts: Mapping[str, str]) -> dict[str, str]:
    """Digest by kernel. texts: kernels/*.py by module name. Raises Unreadable."""
    sources = Sources(texts)
    made: dict[tuple[str, str], str] = {}
    found = {}
    for kernel, function in _kernels(sources):
        place = function.module, function.node.name
        made.setdefault(place, _digest(sources, function) if place not in made else "")
        found[kernel] = made[place]
    return found


def _kernels(sources: Sources) -> Iterator[tuple[str, Function]]:
    for table in TABLES:
        found = sources.find(REGISTRY, table)
        module, value = found or (REGISTRY, None)
        if not isinstance(value, ast.Dict):
            raise Unreadable(f"kernels/{module}.py: {table} can't be read without running it")
        for key, operation in zip(value.keys, value.values):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise Unreadable(f"kernels/{module}.py: {table} has a key that isn't text")
            yield key.value, _function(sources, module, operation)


def _function(sources: Sources, module: str, value: ast.AST) -> Function:
    """The jitted function that an expression refers to."""
    if isinstance(value, ast.FunctionDef):
        return Function(module, value)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return _named(sources, sources.module_of(module, value.value.id), value.attr)
    if isinstance(value, ast.Name):
        return _named(sources, module, value.id)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in MADE_OF:
        wanted = MADE_OF[value.func.id]
        by_name = [k.value for k in value.keywords if k.arg == wanted]
        if len(value.args[:1] + by_name) == 1:
            return _function(sources, module, (value.args[:1] + by_name)[0])
    raise Unreadable(f"kernels/{module}.py, line {getattr(value, 'lineno', 0)}: a kernel's function that can't be resolved")


def _named(sources: Sources, module: str, name: str) -> Function:
    found = sources.find(module, name)
    if found is None:
        raise Unreadable(f"kernels/{module}.py: {name} is undefined")
    return _function(sources, *found)


def _digest(sources: Sources, kernel: Function) -> str:
    """As `kernels.bundle.jitted_sources`, from syntax trees."""
    parts: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if function.node.name in parts:
            continue
        parts[function.node.name] = normalised_source(_text(sources, function))
        for name in _names_in(sources, function):
            found = sources.find(function.module, name)
            if found is None:
                _require_outside(sources, function.module, name)
            elif isinstance(found[1], ast.FunctionDef):
                if _is_jitted(found[1]):
                    waiting.append(Function(*found))  # type: ignore[arg-type]
            elif isinstance(value := _constant(sources, *found), Constant):
                parts[f"global {name}"] = repr(value)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _text(sources: Sources, function: Function) -> str:
    lines = sources.texts[function.module].splitlines(keepends=True)
    return "".join(lines[function.node.lineno - 1:function.node.end_lineno])


def _names_in(sources: Sources, function: Function) -> list[str]:
    """The global and attribute names in the function's code that its module defines."""
    bare = ast.FunctionDef(function.node.name, function.node.args, function.node.body, [], None, None, lineno=1, col_offset=0)
    for argument in (*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs):
        argument.annotation = None
    try:
        module = compile(ast.fix_missing_locations(ast.Module([bare], [])), "kernel", "exec")
    except (SyntaxError, ValueError) as e:
        raise Unreadable(f"kernels/{function.module}.py: {function.node.name}: {e}") from None
    code = next(c for c in module.co_consts if hasattr(c, "co_names") and c.co_name == function.node.name)
    return sorted(name for name in code.co_names if name in sources.names(function.module))


def _is_jitted(node: ast.FunctionDef) -> bool:
    named = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(ast.unparse(d) in JITTED for d in named)


def _require_outside(sources: Sources, module: str, name: str) -> None:
    """Raises Unreadable for an import that may be one of the project's constants."""
    value = sources.names(module)[name]
    if isinstance(value, ast.Import):
        return  # a module is neither a jitted function nor a constant
    if isinstance(value, ast.ImportFrom) and (value.module or "").split(".")[0] in OUTSIDE and not value.level:
        return
    if isinstance(value, ast.ImportFrom) and value.level == 1 and value.module is None:
        return  # a file of kernels/
    raise Unreadable(f"kernels/{module}.py: {name} is imported from outside kernels/")


def _constant(sources: Sources, module: str, value: ast.AST) -> Constant | None:
    """The value of a constant expression; None for any other object. Raises Unreadable."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, Constant) else None
    if isinstance(value, OBJECTS) or (isinstance(value, ast.Call) and ast.unparse(value.func) in CALLS):
        return None
    nodes = list(ast.walk(value))
    powers = [n.right for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow | ast.LShift)]
    bounded = all(isinstance(p, ast.Constant) and isinstance(p.value, int) and p.value <= 64 for p in powers)
    if not isinstance(value, ast.expr) or not bounded or not all(isinstance(n, ARITHMETIC) for n in nodes):
        raise Unreadable(f"kernels/{module}.py, line {getattr(value, 'lineno', 0)}: a constant that can't be resolved")
    names: dict[str, Constant | None] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in names:
            found = sources.find(module, node.id)
            names[node.id] = _constant(sources, *found) if found else None
    if not all(isinstance(n, int | float) for n in (*names.values(), *(n.value for n in nodes if isinstance(n, ast.Constant)))):
        return names[value.id] if isinstance(value, ast.Name) else None
    try:  # numbers and arithmetic alone, without calls
        computed = eval(compile(ast.Expression(value), module, "eval"), {"__builtins__": {}}, names)
    except ArithmeticError as e:
        raise Unreadable(f"kernels/{module}.py: {ast.unparse(value)}: {e}") from None
    assert isinstance(computed, int | float)
    return computed
