"""What a server allows, and to whom."""

from __future__ import annotations

import ipaddress
import math

from attrs import field, frozen

from ...fsm.errors import TwoStrokeError


class InvalidServeConfig(TwoStrokeError, ValueError):
    """A server setting that cannot work or is not safe; ``setting`` names it and the message says what would be."""

    def __init__(self, setting: str, reason: str) -> None:
        self.setting = setting
        super().__init__(f"{setting}: {reason}")


@frozen(kw_only=True)
class ServeConfig:
    """Settings of a server. Times are in seconds.

    Args:
        host: address to listen on; beyond this machine only with an API key, or with ``allow_public``.
        port: 0 for any free one.
        served_model_names: what clients may call the model; the first one is used in answers. Empty: the model's name.
        api_keys: any of them lets a client in; empty: everybody.
        allow_public: serve without a key on an address that others can reach.
        allowed_origins: web pages of other origins that may call (``https://chat.example``).
        max_queue: completions that may wait beside those that run; more are answered with 429.
        max_n: completions of one prompt.
        max_prompts: prompts of one call.
        max_logprobs: alternatives a token.
        max_body_bytes: size of a request's body.
        max_prompt_chars_per_token: a prompt of more characters than this times the context length is refused before
            it is tokenized.
        request_timeout_s: from the arrival of a request to its last byte.
        header_timeout_s: for a request to begin on an open connection, and for its header to arrive.
        body_timeout_s: for a request's body to arrive.
        drain_timeout_s: for requests in flight to end by themselves when the server is asked to stop.
        vllm_metrics: export the metrics under vLLM's names too.
        otlp_traces_endpoint: where OpenTelemetry traces go, over HTTP; empty: there are none.
        exit_on_fault: stop, with a non-zero exit code, when the engine can't go on.

    Raises:
        InvalidServeConfig: a value outside its domain, or a public address without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = field(default=(), converter=tuple)
    api_keys: tuple[str, ...] = field(default=(), converter=tuple, repr=False)
    allow_public: bool = False
    allowed_origins: tuple[str, ...] = field(default=(), converter=tuple)
    max_queue: int = 256
    max_n: int = 16
    max_prompts: int = 64
    max_logprobs: int = 20
    max_body_bytes: int = 8 * 2**20
    max_prompt_chars_per_token: int = 64
    request_timeout_s: float = 600.0
    header_timeout_s: float = 60.0
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    vllm_metrics: bool = False
    otlp_traces_endpoint: str = ""
    exit_on_fault: bool = False

    def __attrs_post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidServeConfig(name, f"must be an integer from {low} to {high}, got {value!r}")
        for name in ("request_timeout_s", "header_timeout_s", "body_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InvalidServeConfig(name, f"must be a number of seconds, got {value!r}")
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            reason = f"must be like http://localhost:4318/v1/traces, got {self.otlp_traces_endpoint!r}"
            raise InvalidServeConfig("otlp_traces_endpoint", reason)
        if any(not key or not key.isascii() for key in self.api_keys):
            raise InvalidServeConfig("api_keys", "a key must be ASCII text and not empty")
        if not (self.is_local or self.api_keys or self.allow_public):
            raise InvalidServeConfig(
                "host",
                f"{self.host} can be reached from other machines, and there is no API key: set one "
                "(--api-key or TWOSTROKE_API_KEY), listen on 127.0.0.1, or pass --allow-public",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean any address
            return False


_INTEGERS = (
    ("port", 0, 65535),
    ("max_queue", 0, 10**6),
    ("max_n", 1, 1024),
    ("max_prompts", 1, 10**4),
    ("max_logprobs", 0, 10**6),
    ("max_body_bytes", 1024, 2**32),
    ("max_prompt_chars_per_token", 1, 10**6),
)
