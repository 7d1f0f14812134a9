"""Random steps with injected faults through runner and scheduler: what was checked, lost, doubled, and what has grown.

``PYTHONPATH=tests/support python tests/stateful/soak.py --steps 100000``; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from endurance import Report, Soak
from reference import References
from twostroke.engine.models.random_model import random_model, tiny_config

MOST_GROWTH = 0.01


def problems(report: Report) -> list[str]:
    """What is not as it should be."""
    found = [f"{count} {name}" for name, count in report.wrong.items()]
    if report.resident_growth >= MOST_GROWTH:
        found.append(f"resident memory grew by {report.resident_growth:.2%}")
    return found + [f"{name} grew by {size}" for name, size in report.growth.items()]


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=100_000, help="steps in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: %(default)s)")
    parser.add_argument("--faults", type=float, default=0.01, help="share of steps with a fault (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    report = Soak(References(random_model(tiny_config())), options.seed, options.faults).run(options.steps)
    print(report)
    print(f"{'seconds':24}{time.perf_counter() - started:>12,.0f}")
    found = problems(report)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
