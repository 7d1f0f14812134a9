"""The command ``twostroke``. Reading the arguments needs no torch; each command imports what it uses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..fsm.errors import TwoStrokeError
from .cli_ab import add_ab
from .cli_recording import add_recording, add_watch
from .cli_replay import add_replay
from .cli_serve import add_serve
from .cli_timeline import add_timeline

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a failure, 2 for bad input, 130 for an interrupt."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except (TwoStrokeError, OSError) as error:
        return _complain(str(error), BAD_INPUT if isinstance(error, (ValueError, FileNotFoundError)) else FAILED)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    parser = argparse.ArgumentParser(prog="twostroke", description="A step engine for large language models.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser("generate", help="generate text for several prompts at once"))
    add_serve(commands.add_parser("serve", help="serve a model over HTTP, with OpenAI's API"))
    add_ab(commands.add_parser("ab", help="compare the runner as it is with other stages: speed and tokens"))
    add_replay(commands.add_parser("replay", help="run a recording again, or compare it with another one"))
    add_timeline(commands.add_parser("timeline", help="make a page and a Perfetto trace of a recording"))
    add_watch(commands.add_parser("watch", help="follow a recording while it is written"))
    _add_diagram(commands.add_parser("diagram", help="print the state machine as a mermaid diagram"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.description = "Generate text for several prompts at once, streaming, and show where the time went."
    prompts = parser.add_argument_group("prompts (without any, eight of its own)")
    prompts.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given again")
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    prompts.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the model's chat template (default: only to its own prompts)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (64)")
    sampling.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (0.7)")
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="(0.95)")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (0)")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a text before this string")
    sampling.add_argument(
        "--extra", action="append", default=[], metavar="NAME=VALUE", help="a parameter of a stage; may be given again"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", default="smollm2", help="folder, GGUF file, hub id, or smollm2 (the packaged model)")
    engine.add_argument("--device", default="auto", help="cpu, cuda or auto")
    engine.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    engine.add_argument("--num-threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    engine.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="requests in one step at most (64)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in one step (2048)"
    )
    engine.add_argument(
        "--sync", action="store_true", help="wait for the tokens of a step before the next one is launched"
    )
    engine.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="PLACE=SPEC",
        help="put a stage in place: sample=my_package:MinKSampler, or an entry point's name; may be given again",
    )
    add_recording(parser)
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")


def _add_diagram(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_diagram)
    parser.add_argument("--life", action="store_true", help="the machine of a runner's life instead of a step's")


def _generate(args: argparse.Namespace) -> int:
    from .cli_generate import generate

    return generate(args)


def _diagram(args: argparse.Namespace) -> int:
    from ..fsm.diagram import life_diagram, step_diagram

    print(life_diagram() if args.life else step_diagram())
    return 0


def _complain(message: str, code: int) -> int:
    print(f"twostroke: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
