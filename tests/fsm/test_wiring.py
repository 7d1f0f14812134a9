"""Reading what a stage takes and gives from its annotations."""

import functools
from typing import Any, Optional, Protocol, runtime_checkable

import pytest
import torch
from twostroke.fsm import Pipeline, Transaction, WiringError, stage


class A: ...


class B: ...


class C: ...


class D(A): ...


@runtime_checkable
class HasName(Protocol):
    name: str


class NotCheckable(Protocol):
    name: str


def run(fn: object, *records: object, given: tuple = (A,)) -> dict:
    return Pipeline([("only", fn)], given=given).run({type(record): record for record in records})  # type: ignore[list-item]


def function(a: A) -> B:
    assert type(a) is A
    return B()


def by_string(a: "A") -> "B":
    return function(a)


def with_tail(a: A, extra: str = "kept", *, flag: bool = True) -> B:
    assert (extra, flag) == ("kept", True)
    return function(a)


def keyword_only(*, a: A) -> B:
    return function(a)


class Callable_:
    def __call__(self, a: A) -> B:
        return function(a)

    def method(self, a: A) -> B:
        return function(a)

    @staticmethod
    def static(a: A) -> B:
        return function(a)

    @classmethod
    def of_class(cls, a: A) -> B:
        return function(a)


@functools.wraps(function)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def scaled(scale: int, a: A, *, offset: int) -> B:
    assert (scale, offset) == (2, 3)
    return function(a)


def positional_only(a: A, /) -> B:
    return function(a)


READABLE = {
    "function": function,
    "string annotations": by_string,
    "defaults that nothing gives": with_tail,
    "keyword-only": keyword_only,
    "positional-only": positional_only,
    "object": Callable_(),
    "bound method": Callable_().method,
    "static method": Callable_.static,
    "class method": Callable_.of_class,
    "decorated": wrapped,
    "partial": functools.partial(scaled, 2, offset=3),
    "partial of a partial": functools.partial(functools.partial(scaled, 2), offset=3),
    "declared": stage(lambda a: function(a), takes=[A], gives=B),
    "declared module": stage(torch.nn.Identity(), takes=[A], gives=A),
}


@pytest.mark.parametrize("fn", READABLE.values(), ids=READABLE.keys())
def test_readable_stages(fn) -> None:
    a = A()
    records = run(fn, a)
    assert records[A] is a
    assert isinstance(records.get(B, a), A | B)


def test_optional_spellings_bind_none_or_the_record() -> None:
    seen: list[object] = []

    def bar(a: A | None) -> None:
        seen.append(a)

    def optional(a: Optional[A]) -> None:  # noqa: UP045
        seen.append(a)

    def quoted(a: "A | None") -> None:
        seen.append(a)

    def with_default(a: A | None = None) -> None:
        seen.append(a)

    a = A()
    for fn in (bar, optional, quoted, with_default):
        run(fn, given=())
        run(fn, a, given=())
        run(fn, a)
    assert seen == [None, a, a] * 4


def test_defaults_give_way_to_a_record() -> None:
    default, given = A(), A()
    seen: list[tuple] = []

    def fn(a: A = default, b: B | None = None, *, c: C) -> None:
        seen.append((a, b, c))

    b, c = B(), C()
    run(fn, c, b, given=(C, B))
    run(fn, c, b, given, given=(A, C, B))
    assert seen == [(default, b, c), (given, b, c)]


def test_any_stage_may_take_the_transaction() -> None:
    transaction = Transaction(1)

    def first(tx: Transaction, a: A) -> B:
        assert tx is transaction
        return B()

    def second(b: B, tx: Transaction) -> None:
        assert tx is transaction

    Pipeline([("first", first), ("second", second)], given=(A,)).run({A: A(), Transaction: transaction})


def test_a_subclass_and_a_checkable_protocol_are_filed_under_the_declared_type() -> None:
    class Named:
        name = "n"

    def subclass(a: A) -> A:
        return D()

    assert isinstance(run(subclass, A())[A], D)
    records = run(stage(Named, gives=HasName))
    assert isinstance(records[HasName], Named)


def no_return(a: A): ...


def no_annotation(a) -> B: ...


def alias(a: list[int]) -> B: ...


def union_return(a: A) -> B | C: ...


def union_parameter(a: A | B) -> C: ...


def anything(*args: Any, **kwargs: Any) -> B: ...


def any_parameter(a: Any) -> B: ...


def any_object(a: object) -> B: ...


def unresolvable(a: "NotThere") -> B: ...  # type: ignore[name-defined]  # noqa: F821


def protocol(a: NotCheckable) -> B: ...


UNREADABLE = {
    "no return": no_return,
    "no annotation": no_annotation,
    "generic alias": alias,
    "union return": union_return,
    "union parameter": union_parameter,
    "only *args": anything,
    "Any": any_parameter,
    "object": any_object,
    "name that does not resolve": unresolvable,
    "protocol": protocol,
    "lambda": lambda a: a,
    "module": torch.nn.Identity(),
    "builtin": print,
}


@pytest.mark.parametrize("fn", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_annotations_name_the_way_out(fn) -> None:
    with pytest.raises(WiringError, match=r"'the_stage'.*stage\(fn, takes=\(\.\.\.\), gives=\.\.\.\)"):
        Pipeline([("the_stage", fn)], given=(A,))


def test_local_records_in_strings_need_the_way_out_and_it_works() -> None:
    class Local: ...

    def fn(a: "Local") -> "Local":
        return a

    with pytest.raises(WiringError, match="stage\\(fn"):
        Pipeline([("fn", fn)], given=(Local,))
    local = Local()
    assert Pipeline([("fn", stage(fn, takes=[Local], gives=Local))], given=(Local,)).run({Local: local}) == {
        Local: local
    }


def test_a_class_instead_of_an_instance() -> None:
    with pytest.raises(WiringError, match=r"'x' is the class Callable_; pass an instance, Callable_\(\.\.\.\)"):
        Pipeline([("x", Callable_)], given=(A,))


def test_something_that_cannot_be_called() -> None:
    with pytest.raises(WiringError, match="'x' is a int, which cannot be called"):
        Pipeline([("x", 3)])  # type: ignore[list-item]


@pytest.mark.parametrize("declare", [{"takes": [list[int]]}, {"gives": A | B}, {"takes": [None]}])
def test_declared_wiring_is_checked(declare: dict) -> None:
    with pytest.raises(WiringError, match="does not name one record class"):
        stage(function, **declare)


def test_declared_optionals() -> None:
    seen: list[object] = []
    declared = stage(lambda a, b: seen.append((a, b)), takes=(A, B | None))
    a = A()
    run(declared, a)
    assert seen == [(a, None)]
    assert declared.fn is not None
    assert stage(function, takes=(A,), gives=B)(a).__class__ is B
