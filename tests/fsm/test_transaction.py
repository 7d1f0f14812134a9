"""Undo, commit, savepoints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twostroke.fsm import Savepoint, Transaction, TransactionError, TransactionFailed


def test_rollback_runs_undos_in_reverse_once_and_no_commits() -> None:
    transaction, ran = Transaction(3, ["r0"]), []
    for name in "abc":
        transaction.on_undo(ran.append, name)
        transaction.on_commit(ran.append, name.upper())
    assert not transaction.closed
    transaction.rollback()
    transaction.rollback()
    assert ran == ["c", "b", "a"]
    assert transaction.closed
    assert (transaction.step, transaction.request_ids) == (3, ["r0"])


def test_commit_runs_actions_in_order_once_and_no_undos() -> None:
    transaction, ran = Transaction(3), []
    for name in "abc":
        transaction.on_undo(ran.append, name)
        transaction.on_commit(ran.append, name.upper())
    transaction.commit()
    transaction.commit()
    assert ran == ["A", "B", "C"]
    assert transaction.closed


@pytest.mark.parametrize(("end", "other"), [("commit", "rollback"), ("rollback", "commit")])
def test_an_ended_transaction_takes_nothing_more(end: str, other: str) -> None:
    transaction = Transaction(5)
    mark = transaction.savepoint()
    getattr(transaction, end)()
    for use in (
        getattr(transaction, other),
        lambda: transaction.on_undo(print),
        lambda: transaction.on_commit(print),
        transaction.savepoint,
        lambda: transaction.rollback_to(mark),
    ):
        with pytest.raises(TransactionError, match="step 5"):
            use()


@pytest.mark.parametrize(("push", "end", "order"), [("on_undo", "rollback", "cba"), ("on_commit", "commit", "abc")])
def test_all_actions_run_although_some_raise(push: str, end: str, order: str) -> None:
    transaction, ran = Transaction(9), []

    def act(name: str) -> None:
        ran.append(name)
        if name != "b":
            raise ValueError(name)

    for name in "abc":
        getattr(transaction, push)(act, name)
    with pytest.raises(TransactionFailed, match=f"{end} of step 9: 2 of its actions raised") as caught:
        getattr(transaction, end)()
    assert "".join(ran) == order
    assert [str(error) for error in caught.value.errors] == [name for name in order if name != "b"]
    assert caught.value.__cause__ is caught.value.errors[0]
    getattr(transaction, end)()
    assert "".join(ran) == order


def test_savepoint_undoes_the_second_stroke_and_keeps_the_first() -> None:
    transaction, ran = Transaction(1), []
    transaction.on_undo(ran.append, "undo first")
    transaction.on_commit(ran.append, "commit first")
    mark = transaction.savepoint()
    for _ in range(2):
        transaction.on_undo(ran.append, "undo second")
        transaction.on_commit(ran.append, "commit second")
        transaction.rollback_to(mark)
    assert ran == ["undo second"] * 2
    assert not transaction.closed
    transaction.on_undo(ran.append, "undo retry")
    transaction.on_commit(ran.append, "commit retry")
    transaction.commit()
    assert ran[2:] == ["commit first", "commit retry"]


def test_rollback_after_rollback_to_runs_the_rest() -> None:
    transaction, ran = Transaction(1), []
    transaction.on_undo(ran.append, "first")
    mark = transaction.savepoint()
    transaction.on_undo(ran.append, "second")
    transaction.rollback_to(mark)
    transaction.rollback()
    assert ran == ["second", "first"]


def test_a_savepoint_that_was_rolled_back_is_refused() -> None:
    transaction = Transaction(1)
    outer = transaction.savepoint()
    transaction.on_undo(print)
    inner = transaction.savepoint()
    transaction.rollback_to(outer)
    with pytest.raises(TransactionError, match="beyond this savepoint"):
        transaction.rollback_to(inner)
    transaction.rollback_to(outer)


def test_failing_undo_after_a_savepoint_leaves_the_transaction_open() -> None:
    transaction, ran = Transaction(1), []
    transaction.on_undo(ran.append, "first")
    mark = transaction.savepoint()
    transaction.on_undo([].pop)
    with pytest.raises(TransactionFailed):
        transaction.rollback_to(mark)
    transaction.rollback()
    assert ran == ["first"]


def test_an_interrupted_rollback_goes_on_with_the_undo_that_was_cut_short() -> None:
    transaction, ran = Transaction(1), []

    def cut_short_once() -> None:
        ran.append("cut short" if "cut short" not in ran else "whole")
        if ran[-1] == "cut short":
            raise KeyboardInterrupt

    transaction.on_undo(ran.append, "first")
    transaction.on_undo(cut_short_once)
    transaction.on_undo(ran.append, "last")
    with pytest.raises(KeyboardInterrupt):
        transaction.rollback()
    transaction.rollback()
    assert ran == ["last", "cut short", "whole", "first"]


KEYS = st.sampled_from("abcd")
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("savepoint")),
        st.tuples(st.just("back"), st.integers(0, 3)),
    ),
    max_size=30,
)
MISSING = object()


def restore(state: dict[str, int], key: str, value: object) -> None:
    if value is MISSING:
        state.pop(key, None)
    else:
        state[key] = value  # type: ignore[assignment]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, st.integers(0, 9)), CHANGES, st.booleans())
def test_undo_restores_a_random_state(start: dict[str, int], changes: list[tuple], commits: bool) -> None:
    state, transaction = dict(start), Transaction(1)
    freed: list[str] = []
    marks: list[tuple[Savepoint, dict[str, int], list[str]]] = []
    expected_freed: list[str] = []
    for change in changes:
        match change:
            case ("set", key, value):
                transaction.on_undo(restore, state, key, state.get(key, MISSING))
                state[key] = value
            case ("delete", key):
                transaction.on_undo(restore, state, key, state.get(key, MISSING))
                transaction.on_commit(freed.append, key)
                expected_freed.append(key)
                state.pop(key, None)
            case ("savepoint",):
                marks.append((transaction.savepoint(), dict(state), list(expected_freed)))
            case ("back", back) if back < len(marks):
                del marks[len(marks) - back :]
                mark, then, expected_freed = marks[-1] if marks else (Savepoint(0, 0), dict(start), [])
                expected_freed = list(expected_freed)
                transaction.rollback_to(mark)
                assert state == then
    last = dict(state)
    transaction.commit() if commits else transaction.rollback()
    assert state == (last if commits else start)
    assert freed == (expected_freed if commits else [])
