"""The house rules of CONTRIBUTING.md that can be read off the source, checked for every file.

A rule is a function from a :class:`Source` to the places that break it. Each rule is shown to bite, and to let good
code pass, on a few lines of text.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

ROOT = Path(__file__).resolve().parent.parent
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@frozen(eq=False)
class Source:
    """A parsed file; ``path`` is relative to the root of the repository."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: str | Path, text: str) -> Source:
        """Parse ``text`` as the content of ``path``."""
        return cls(Path(path), text, ast.parse(text))

    def functions(self) -> Iterator[tuple[FunctionNode, bool]]:
        """Every function and whether it is a method."""
        for parent in ast.walk(self.tree):
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, FunctionNode):
                    yield node, isinstance(parent, ast.ClassDef)


Rule = Callable[[Source], Iterable[str]]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def is_kernel(name: str) -> bool:
    """Whether a function's name or a file's path says that it is a kernel."""
    return "kernel" in name.lower()


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c`` or ``c``, with or without a call or a subscript after it; "" for anything else."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def file_length(source: Source) -> Iterator[str]:
    """350 lines a file, 500 a test file, 60 an example."""
    top, *rest = source.path.parts
    limit = {"tests": 500, "examples": 60 if len(rest) == 1 else 350}.get(top, 350)
    lines = len(source.text.splitlines())
    if lines > limit:
        yield f"{lines} lines, at most {limit}"


def function_length(source: Source) -> Iterator[str]:
    """60 lines a function, 120 a kernel; decorators do not count."""
    for node, _ in source.functions():
        limit = 120 if is_kernel(str(source.path)) or is_kernel(node.name) else 60
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > limit:
            yield f"line {node.lineno}: {node.name} has {lines} lines, at most {limit}"


def parameter_count(source: Source) -> Iterator[str]:
    """6 parameters, keyword-only ones included; not counted are self, cls, ``*args`` and ``**kwargs``.

    A kernel takes a pointer and strides for each tensor and is exempt.
    """
    for node, is_method in source.functions():
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if is_method and names and "staticmethod" not in map(last_name, node.decorator_list):
            names = names[1:]
        is_exempt = is_kernel(node.name) or any(last_name(decorator) == "jit" for decorator in node.decorator_list)
        if len(names) > 6 and not is_exempt:
            yield f"line {node.lineno}: {node.name} takes {len(names)} parameters, at most 6"


def no_global(source: Source) -> Iterator[str]:
    """No ``global`` statement."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_BUILDERS = words("list dict set bytearray defaultdict deque Counter OrderedDict")
STATEFUL_BUILDERS = words(
    "Condition ContextVar Event Lock ProcessPoolExecutor Queue RLock Semaphore SimpleQueue Thread ThreadPoolExecutor"
    " WeakKeyDictionary WeakValueDictionary WeakSet count cycle iter local"
)
STATELESS_BUILDERS = words(
    "NewType ParamSpec TypeAliasType TypeVar TypeVarTuple attrgetter compile frozenset getLogger itemgetter namedtuple"
    " tuple"
)
MUTATORS = words(
    "add append appendleft clear difference_update discard extend extendleft insert intersection_update pop popitem"
    " popleft remove reverse setdefault sort symmetric_difference_update update"
)


def assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr, int]]:
    """``(name, value, line)`` of each name bound in a module or class body, also below if, try and with."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((last_name(target), node.value, node.lineno) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield last_name(node.target), node.value, node.lineno
        elif not isinstance(node, FunctionNode | ast.ClassDef):
            for inner in ("body", "orelse", "handlers", "finalbody"):
                yield from assignments(getattr(node, inner, ()))


def state_in(value: ast.expr, *, is_constant: bool) -> str | None:
    """What is mutable about a value bound at module level, or None. Filled containers pass under a constant's name."""
    builder = last_name(value) if isinstance(value, ast.Call) else ""
    if builder in STATEFUL_BUILDERS:
        return f"a {builder}"
    is_container = isinstance(value, MUTABLE_DISPLAYS) or builder in MUTABLE_BUILDERS
    is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
    if is_container and (is_empty or (isinstance(value, ast.Call) and not value.args and not value.keywords)):
        return "an empty container, there to be filled"
    if is_constant:
        return None
    if is_container:
        return "a mutable container"
    return f"an object made by {builder or 'a call'}" if isinstance(value, ast.Call) else None


def mutated_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names whose object is changed in place: item assignment or deletion, ``+=``, a mutating method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield last_name(node.value), node.lineno
        elif isinstance(node, ast.AugAssign):
            yield last_name(node.target), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield last_name(node.func.value), node.lineno


def no_module_state(source: Source) -> Iterator[str]:
    """Modules hold constants: an UPPER_CASE name may hold a filled container, if nothing in the file changes it.

    Other names hold nothing mutable (a logger, a type variable or a compiled pattern is fine). Class bodies hold no
    container that their instances would share.
    """
    constants = {name for name, _, _ in assignments(source.tree.body) if CONSTANT.fullmatch(name)}
    for name, value, line in assignments(source.tree.body):
        builder = last_name(value) if isinstance(value, ast.Call) else ""
        if name == "__all__" or builder in STATELESS_BUILDERS:
            continue
        if state := state_in(value, is_constant=name in constants):
            yield f"line {line}: {name} is {state}"
    for name, line in mutated_names(source.tree):
        if name in constants:
            yield f"line {line}: changes the constant {name}"
    for owner in ast.walk(source.tree):
        if isinstance(owner, ast.ClassDef):
            yield from shared_by_instances(owner)


def shared_by_instances(owner: ast.ClassDef) -> Iterator[str]:
    """Containers in a class body, other than constants."""
    for name, value, line in assignments(owner.body):
        is_built = isinstance(value, ast.Call) and last_name(value) in MUTABLE_BUILDERS
        if (is_built or isinstance(value, MUTABLE_DISPLAYS)) and not CONSTANT.fullmatch(name) and name != "__slots__":
            yield f"line {line}: {owner.name}.{name} is one container for all instances"


def no_loose_ends(source: Source) -> Iterator[str]:
    """No note to finish something later, no method left out."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := re.search(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b", line):
            yield f"line {number}: {found[0]}"


def is_silent(statement: ast.stmt) -> bool:
    """Whether a statement does nothing: pass, continue, an ellipsis, a string."""
    is_bare_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_bare_constant or isinstance(statement, ast.Pass | ast.Continue)


BROAD = words("Exception BaseException")


def no_swallowed_errors(source: Source) -> Iterator[str]:
    """A handler does something about the error; one that does nothing names narrow errors and says why."""
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type] if node.type else []
            caught = set(map(last_name, kinds))
            is_broad = not caught or caught & BROAD
            is_explained = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
            if all(map(is_silent, node.body)) and (is_broad or not is_explained):
                yield f"line {node.lineno}: the handler does nothing{'' if is_broad else ' and does not say why'}"
            elif not caught and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield f"line {node.lineno}: catches everything, interrupts too, and does not raise it again"
        elif isinstance(node, ast.Call) and last_name(node) == "suppress":
            for broad in BROAD & set(map(last_name, node.args)):
                yield f"line {node.lineno}: suppresses every {broad}"


def public_definitions(body: Iterable[ast.stmt]) -> Iterator[FunctionNode | ast.ClassDef]:
    """Public classes and functions of a body, less those that another definition speaks for."""
    for node in body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not words("overload override setter deleter") & set(map(last_name, node.decorator_list)):
            yield node


def docstrings(source: Source) -> Iterator[str]:
    """Modules, public classes, functions and methods say what they are; a method of a subclass may inherit it."""
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield "line 1: the module has no docstring"
    definitions = list(public_definitions(source.tree.body))
    for node in definitions:
        if ast.get_docstring(node) is None:
            yield f"line {node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            is_subclass = bool(set(map(last_name, node.bases)) - words("ABC Generic Protocol"))
            definitions += [
                member
                for member in public_definitions(node.body)
                if isinstance(member, ast.ClassDef) or not is_subclass
            ]


def asserts_explain(source: Source) -> Iterator[str]:
    """An assert in the product states an invariant and says which."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield f"line {node.lineno}: assert without a message"


CHECKS = re.compile(r"(assert|check|expect|verify|raises$|warns$|fail$|run_state_machine_as_test$)", re.IGNORECASE)


def checks_something(node: ast.AST, helpers: frozenset[str]) -> bool:
    """Whether code asserts something that can be false, or calls what does."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert) and not isinstance(inner.test, ast.Constant):
            return True
        if isinstance(inner, ast.Call):
            name = last_name(inner.func)
            if CHECKS.match(name.lstrip("_")) or name in helpers:
                return True
    return False


def has_assertion(source: Source) -> Iterator[str]:
    """A test asserts something, itself or through a function of the same file."""
    functions = [node for node, _ in source.functions()]
    helpers: frozenset[str] = frozenset()
    while (found := frozenset(node.name for node in functions if checks_something(node, helpers))) != helpers:
        helpers = found
    for node in functions:
        if node.name.startswith("test_") and node.name not in helpers:
            yield f"line {node.lineno}: {node.name} asserts nothing"


ANYWHERE: tuple[Rule, ...] = (file_length, function_length, no_global)
PRODUCT: tuple[Rule, ...] = (
    parameter_count,
    no_module_state,
    no_loose_ends,
    no_swallowed_errors,
    docstrings,
    asserts_explain,
)
RULES_BY_FOLDER: dict[str, tuple[Rule, ...]] = {
    "fsm": ANYWHERE + PRODUCT,
    "stages": ANYWHERE + PRODUCT,
    "engine": ANYWHERE + PRODUCT,
    "examples": (*ANYWHERE, no_loose_ends, no_swallowed_errors),
    "tests": (*ANYWHERE, has_assertion),
}
CASES = [
    pytest.param(rule, path, id=f"{rule.__name__}-{path}")
    for folder, rules in RULES_BY_FOLDER.items()
    for path in sorted(found.relative_to(ROOT) for found in (ROOT / folder).rglob("*.py"))
    for rule in rules
]


@functools.cache
def read(path: Path) -> Source:
    """A file of the repository; parsed once for all rules."""
    return Source.of(path, (ROOT / path).read_text())


@pytest.mark.parametrize(("rule", "path"), CASES)
def test_house_rule(rule: Rule, path: Path) -> None:
    assert [f"{path}: {finding}" for finding in rule(read(path))] == []


LONG_BODY = "\n".join(f"    x = {number}" for number in range(61))
BAD: list[tuple[Rule, str, str]] = [
    (file_length, "fsm/a.py", "x = 1\n" * 351),
    (file_length, "tests/fsm/test_a.py", "x = 1\n" * 501),
    (file_length, "examples/a.py", "x = 1\n" * 61),
    (function_length, "fsm/a.py", f"def f():\n{LONG_BODY}"),
    (function_length, "fsm/a.py", f"class A:\n  async def f(self):\n{LONG_BODY}"),
    (function_length, "engine/kernels/a.py", f"def f():\n{LONG_BODY}\n{LONG_BODY}"),
    (parameter_count, "fsm/a.py", "def f(a, b, c, d, e, f, g): ..."),
    (parameter_count, "fsm/a.py", "class A:\n  def f(self, a, b, c, /, d, e, *, f, g): ..."),
    (parameter_count, "fsm/a.py", "class A:\n  @staticmethod\n  def f(a, b, c, d, e, f, g): ..."),
    (no_global, "fsm/a.py", "def f():\n  global x\n  x = 1"),
    (no_module_state, "fsm/a.py", "seen = [1]"),
    (no_module_state, "fsm/a.py", "seen: dict[str, int] = dict(a=1)"),
    (no_module_state, "fsm/a.py", "REGISTRY = {}"),
    (no_module_state, "fsm/a.py", "SEEN: set[str] = set()"),
    (no_module_state, "fsm/a.py", "LOCK = threading.Lock()"),
    (no_module_state, "fsm/a.py", "machine = StepMachine()"),
    (no_module_state, "fsm/a.py", "if True:\n  seen = {1}"),
    (no_module_state, "fsm/a.py", "NAMES = {'a': 1}\ndef f(): NAMES['b'] = 2"),
    (no_module_state, "fsm/a.py", "NAMES = ['a']\ndef f(): NAMES.append('b')"),
    (no_module_state, "fsm/a.py", "NAMES = ['a']\ndef f(): del NAMES[0]"),
    (no_module_state, "fsm/a.py", "TOTAL = 0\ndef f():\n  TOTAL += 1"),
    (no_module_state, "fsm/a.py", "class A:\n  seen = []"),
    (no_loose_ends, "fsm/a.py", "x = 1  # TODO: more"),
    (no_loose_ends, "fsm/a.py", "def f():\n  raise NotImplementedError"),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept ValueError: pass"),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept (KeyError, Exception): pass  # never mind"),
    (no_swallowed_errors, "fsm/a.py", "for x in y:\n  try: f()\n  except Exception: continue"),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept: log()"),
    (no_swallowed_errors, "fsm/a.py", "with contextlib.suppress(Exception): f()"),
    (docstrings, "fsm/a.py", "x = 1"),
    (docstrings, "fsm/a.py", "'''Doc.'''\ndef f(): ..."),
    (docstrings, "fsm/a.py", "'''Doc.'''\nclass A: ..."),
    (docstrings, "fsm/a.py", "'''Doc.'''\nclass A(Protocol):\n  '''Doc.'''\n  def f(self): ..."),
    (asserts_explain, "fsm/a.py", "assert x > 0"),
    (has_assertion, "tests/test_a.py", "def test_a(): f()"),
    (has_assertion, "tests/test_a.py", "def helper(): f()\ndef test_a():\n  helper()\n  assert True"),
]
GOOD: list[tuple[Rule, str, str]] = [
    (file_length, "fsm/a.py", "x = 1\n" * 350),
    (file_length, "tests/fsm/test_a.py", "x = 1\n" * 500),
    (file_length, "examples/benchmarks/a.py", "x = 1\n" * 350),
    (function_length, "engine/kernels/a.py", f"def f():\n{LONG_BODY}"),
    (function_length, "engine/a.py", f"def attention_kernel():\n{LONG_BODY}"),
    (parameter_count, "fsm/a.py", "class A:\n  def f(self, a, b, c, d, e, f): ..."),
    (parameter_count, "fsm/a.py", "class A:\n  @classmethod\n  def f(cls, a, b, c, d, e, f): ..."),
    (parameter_count, "fsm/a.py", "def f(a, b, c, d, e, f, *args, **kwargs): ..."),
    (parameter_count, "fsm/a.py", "@triton.jit\ndef f(a, b, c, d, e, f, g): ..."),
    (no_module_state, "fsm/a.py", "__all__ = ['a']\n_TABLE = {'a': 1}\nEMPTY = Record()\nLIMIT = 3"),
    (no_module_state, "fsm/a.py", "logger = logging.getLogger(__name__)\nT = TypeVar('T')\nIds = Sequence[int]"),
    (no_module_state, "fsm/a.py", "TABLE = {'a': 1}\ndef f():\n  seen = []\n  seen.append(TABLE['a'])"),
    (
        no_module_state,
        "fsm/a.py",
        "class A:\n  __slots__ = ['a']\n  NAMES = {'a': 1}\n  seen: list[int] = field(factory=list)",
    ),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept ValueError as e: raise A from e"),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept:\n  undo()\n  raise"),
    (no_swallowed_errors, "fsm/a.py", "with contextlib.suppress(FileNotFoundError): f()"),
    (no_swallowed_errors, "fsm/a.py", "try: f()\nexcept KeyError:\n  pass  # it was never added"),
    (docstrings, "fsm/__init__.py", ""),
    (docstrings, "fsm/a.py", "'''Doc.'''\nclass A(B):\n  '''Doc.'''\n  def f(self): ..."),
    (docstrings, "fsm/a.py", "'''Doc.'''\nclass _A:\n  def f(self): ...\ndef _g(): ..."),
    (docstrings, "fsm/a.py", "'''Doc.'''\nclass A:\n  '''Doc.'''\n  def __call__(self): ..."),
    (asserts_explain, "fsm/a.py", "assert x > 0, 'x counts requests'"),
    (has_assertion, "tests/test_a.py", "def test_a(x): assert x"),
    (has_assertion, "tests/test_a.py", "def test_a():\n  with pytest.raises(ValueError): f()"),
    (has_assertion, "tests/test_a.py", "def inner(x): assert x\ndef outer(): inner(1)\ndef test_a(): outer()"),
    (has_assertion, "tests/test_a.py", "def test_a(x, y): torch.testing.assert_close(x, y)"),
]


def numbered(cases: list[tuple[Rule, str, str]]) -> list[str]:
    """Test ids: the rule and the number of the case."""
    return [f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(cases)]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=numbered(BAD))
def test_the_rule_bites(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(Source.of(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD, ids=numbered(GOOD))
def test_the_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source.of(path, text))) == []


def test_every_rule_is_shown_to_bite() -> None:
    used = {rule for rules in RULES_BY_FOLDER.values() for rule in rules}
    assert used == {rule for rule, _, _ in BAD}
