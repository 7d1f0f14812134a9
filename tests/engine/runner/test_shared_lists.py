"""Lists and arrays that a scheduler sends, or a caller is given, are theirs: writing in them changes no other step."""

from __future__ import annotations

import numpy as np
from attrs import evolve
from driver import Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.io import ModelRunnerOutput
from twostroke.stages.records import Batch


def test_a_scheduler_may_go_on_writing_in_its_lists(runner: ModelRunner) -> None:
    seen: list[Batch] = []

    def look(batch: Batch) -> None:
        seen.append(batch)

    runner.stages.insert(look, after="update_states", name="look")
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3, 4, 5, 6), 6), Wish("b", (7, 8, 9, 10, 11, 12, 13), 6))
    req_ids, computed = list[str](), np.zeros(2, dtype=np.int64)

    def step(counts: dict[str, int]) -> ModelRunnerOutput:
        output = driver.output(counts)
        cached = output.scheduled_cached_reqs
        if not cached.req_ids:
            result = driver.run(output)
        else:
            req_ids[:], computed[:] = cached.req_ids, cached.num_computed_tokens
            reused = evolve(cached, req_ids=req_ids, num_computed_tokens=computed)  # pyright: ignore[reportArgumentType]
            result = driver.run(evolve(output, scheduled_cached_reqs=reused))
        assert result is not None
        return result

    step({"a": 2, "b": 2})
    second = step({"a": 2, "b": 3})
    third = step({"b": 2, "a": 2})
    assert third.req_id_to_index == {"b": 0, "a": 1}
    assert list(third.req_ids) == ["b", "a"]
    assert second.req_id_to_index == {"a": 0, "b": 1}
    assert list(second.req_ids) == ["a", "b"]
    assert [batch.num_computed_tokens.tolist() for batch in seen] == [[0, 0], [2, 2], [5, 4]]


def test_who_is_given_an_output_may_write_in_it(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 9), Wish("b", (3, 4), 9))
    for counts in ({"a": 2, "b": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 1}):
        output = driver.stepped(counts)
    assert isinstance(output.req_ids, list)
    assert isinstance(output.req_id_to_index, dict)
    output.req_ids.reverse()
    output.req_id_to_index.clear()
    again = driver.stepped({"a": 1, "b": 1})
    assert again.req_id_to_index == {"a": 0, "b": 1}
    turned = driver.stepped({"b": 1, "a": 1})
    assert list(turned.req_ids) == ["b", "a"]
    assert turned.req_id_to_index == {"b": 0, "a": 1}
    table = runner.parts.table
    assert [table.num_tokens[table.rows[req_id]] for req_id in "ab"] == [7, 7]
