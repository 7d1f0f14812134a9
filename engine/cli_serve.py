"""The command ``twostroke serve``: an OpenAI-compatible server. Reading its arguments needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fsm.errors import TwoStrokeError

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .serve.config import ServeConfig

_MIB = 2**20
KEY_VARIABLE = "TWOSTROKE_API_KEY"


class ServeNotInstalled(TwoStrokeError, ImportError):
    """The packages of the extra ``serve`` are missing."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``serve``."""
    parser.set_defaults(run=_serve)
    parser.description = "Serve a model over HTTP, with OpenAI's API. Needs: pip install 'twostroke[serve]'."
    parser.epilog = (
        "SIGTERM and SIGINT let requests in flight end (exit code 0); a second one stops at once (130). "
        "With --exit-on-fault an engine that can't go on ends the server with 3."
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_http(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits"))


def _add_engine(group: Any) -> None:
    group.add_argument("--model", default="smollm2", help="folder, GGUF file, hub id, or smollm2 (the packaged model)")
    group.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME", help="what clients call it; again for more"
    )
    group.add_argument("--device", default="auto", help="cpu, cuda or auto")
    group.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a request (default: the model's)")
    group.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="completions in a step (64)")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step (2048)")
    group.add_argument("--kv-cache-mib", type=int, default=512, metavar="N", help="size of the KV cache (512)")
    group.add_argument("--cudagraph-mode", default="auto", metavar="MODE", help="NONE, PIECEWISE, FULL … (auto)")
    group.add_argument("--no-prefix-caching", action="store_true", help="compute shared prefixes anew")
    group.add_argument("--sync", action="store_true", help="wait for the tokens of a step before the next is launched")
    group.add_argument(
        "--record-failures", type=Path, metavar="DIR", help="when a step fails, write the last steps to a file in DIR"
    )
    group.add_argument("--redact", action="store_true", help="leave token ids out of what is recorded")
    group.add_argument("--stage", action="append", default=[], metavar="PLACE=SPEC", help="put a stage in place")


def _add_http(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="0 for any free one (8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help=f"let in who sends it; better: {KEY_VARIABLE}"
    )
    group.add_argument("--allow-public", action="store_true", help="no key though other machines can reach the address")
    group.add_argument(
        "--allowed-origin", action="append", default=[], metavar="URL", help="a web page's origin that may call"
    )
    group.add_argument("--vllm-metrics", action="store_true", help="export metrics under vLLM's names too")
    group.add_argument(
        "--otlp-traces-endpoint", default="", metavar="URL", help="send OpenTelemetry traces there (twostroke[otel])"
    )
    group.add_argument("--exit-on-fault", action="store_true", help="exit with code 3 when the engine can't go on")
    group.add_argument("--log-format", choices=["json", "text"], default="json")
    group.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"], default="INFO")


def _add_limits(group: Any) -> None:
    group.add_argument("--max-queue", type=int, default=256, metavar="N", help="waiting completions; then 429 (256)")
    group.add_argument("--max-n", type=int, default=16, metavar="N", help="completions of one prompt (16)")
    group.add_argument("--max-body-mib", type=int, default=8, metavar="N", help="size of a request's body (8)")
    group.add_argument("--request-timeout", type=float, default=600, metavar="S", help="seconds for a request (600)")
    group.add_argument("--drain-timeout", type=float, default=30, metavar="S", help="seconds to end what runs (30)")


def _serve(args: argparse.Namespace) -> int:
    try:
        from .serve.server import ApiServer, bound_socket, describe
    except ImportError as error:
        missing = f"twostroke serve needs the package {error.name}: pip install 'twostroke[serve]'"
        raise ServeNotInstalled(missing) from error
    from .serve.app import create_app
    from .serve.logs import set_up_logging
    from .serving_loop import ServingLoop

    config = _serve_config(args)
    set_up_logging(args.log_format, args.log_level)
    with bound_socket(config) as bound:  # before the model is read: an address that is taken is known at once
        runner = _runner(args)
        try:
            if args.record_failures is not None:
                runner.record_failures(args.record_failures, redact=args.redact)
            with ServingLoop(runner) as loop:
                app = create_app(loop, config)

                def announce(server: ApiServer) -> None:
                    print(describe(server, app, config), file=sys.stderr, flush=True)

                server = ApiServer(app, config, announce)
                server.run([bound])
                return server.exit_code
        finally:
            runner.shutdown()


def _serve_config(args: argparse.Namespace) -> ServeConfig:
    from .serve.config import ServeConfig

    return ServeConfig(
        host=args.host,
        port=args.port,
        served_model_names=args.served_model_name,
        api_keys=args.api_key or [key for key in (os.environ.get(KEY_VARIABLE),) if key],
        allow_public=args.allow_public,
        allowed_origins=args.allowed_origin,
        max_queue=args.max_queue,
        max_n=args.max_n,
        max_body_bytes=args.max_body_mib * _MIB,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        vllm_metrics=args.vllm_metrics,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        exit_on_fault=args.exit_on_fault,
    )


def _runner(args: argparse.Namespace) -> ModelRunner:
    import torch

    from .config import EngineConfig, InvalidConfig
    from .model_runner import build_runner
    from .plugins import split_stage

    if args.num_threads is not None:
        if not 1 <= args.num_threads <= 4096:
            raise InvalidConfig(f"--num-threads must be between 1 and 4096, got {args.num_threads}")
        torch.set_num_threads(args.num_threads)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        max_model_len="auto" if args.max_model_len is None else args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_mib * _MIB,
        cudagraph_mode=args.cudagraph_mode,
        enable_prefix_caching=not args.no_prefix_caching,
        async_scheduling=not args.sync,
        stages=map(split_stage, args.stage),
    )
    return build_runner(config)
