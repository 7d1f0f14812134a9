"""What the machine and the pipelines cost a step: eight stages that do nothing, execute and sample, one transaction.

    python examples/benchmarks/machine_overhead.py [repeats]

Prints medians over interleaved repeats, as ratios to the limit and to calling the eight functions directly.
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

from twostroke.fsm import Pipeline, StepMachine, Transaction, stage

LIMIT_US = 60.0
STEPS_A_REPEAT = 20
NAMES = ("update_states", "prepare_inputs", "dispatch", "ubatch_slice", "build_attn", "preprocess", "forward", "sample")
RECORDS = [type(f"{name}_record", (), {}) for name in NAMES]


def empty_stage(index: int) -> Callable[..., object]:
    """A stage that takes the transaction or up to three earlier records, and gives a ready-made one."""
    record = RECORDS[index]()
    takes = RECORDS[max(0, index - 3) : index] or [Transaction]
    return stage(lambda *_: record, takes=takes, gives=RECORDS[index])


def microseconds_a_call(work: Callable[[], None]) -> float:
    started = perf_counter()
    for _ in range(STEPS_A_REPEAT):
        work()
    return (perf_counter() - started) / STEPS_A_REPEAT * 1e6


def main(repeats: int) -> None:
    """Measure and print."""
    stages = [(name, empty_stage(index)) for index, name in enumerate(NAMES)]
    execute = Pipeline(stages[:-1])
    sample = Pipeline(stages[-1:], given=execute.leaves)
    functions = [pipeline[name] for pipeline in (execute, sample) for name in pipeline.names]
    machine = StepMachine()

    def step() -> None:
        transaction = Transaction(step=0)
        records = {Transaction: transaction}
        machine.fire("execute", lambda: execute.run(records), undo=transaction.rollback)
        machine.fire("sample", lambda: sample.run(records), commit=transaction.commit)

    def direct() -> None:
        for function in functions:
            function()

    whole, bare = zip(*[(microseconds_a_call(step), microseconds_a_call(direct)) for _ in range(repeats)], strict=True)
    print(f"a step with eight empty stages: median {median(whole):.1f} us, fastest {min(whole):.1f} us")
    print(f"  {median(whole) / LIMIT_US:.2f} of the limit of {LIMIT_US:.0f} us")
    print(f"  {median(whole) / median(bare):.0f} times calling the eight functions directly ({median(bare):.2f} us)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
