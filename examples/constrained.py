"""Constrain a text with a mask made by hand: the answer may only be digits. python examples/constrained.py

A mask has one bit for each token of the vocabulary, 32 to a word; it goes in with ``sample_tokens``. (A grammar engine
such as xgrammar packs its masks the same way.)
"""

import numpy as np
from twostroke.engine import EngineConfig, SamplingParams, build_runner
from twostroke.engine.serving_loop import scheduler_for
from twostroke.stages.io import GrammarOutput

QUESTION = "Question: How many days does a week have?\nAnswer: A week has"
PARAMS = SamplingParams(temperature=0, max_tokens=6)


def bitmask(allowed: list[int], vocab_size: int) -> np.ndarray:
    """One row of a grammar bitmask: int32 ``[1, ceil(vocab_size / 32)]``."""
    mask = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    mask[allowed] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)[None]


def main() -> None:
    """Ask the same question twice at once, with and without the mask."""
    runner = build_runner(EngineConfig(model="smollm2", device="cpu"))
    assert runner.loaded is not None
    tokenizer, vocab_size = runner.loaded.require_tokenizer(), runner.spec.vocab_size
    digits = [token for token in range(vocab_size) if tokenizer.decode([token]).strip().isdecimal()]
    grammar = GrammarOutput(structured_output_request_ids=["only digits"], grammar_bitmask=bitmask(digits, vocab_size))
    scheduler = scheduler_for(runner)
    tokens: dict[str, list[int]] = {"free": [], "only digits": []}
    for req_id in tokens:
        scheduler.add_request(req_id, tokenizer.encode(QUESTION), PARAMS)
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        if (output := runner.execute_model(scheduled)) is None:
            output = runner.sample_tokens(grammar)  # requests that a mask does not name are free
        for update in scheduler.update_from_output(scheduled, output.get_output()):
            tokens[update.req_id] += update.new_token_ids
    for req_id, ids in tokens.items():
        print(f"{req_id}: {tokenizer.decode(ids)!r}")
    runner.shutdown()


if __name__ == "__main__":
    main()
