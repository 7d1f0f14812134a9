"""What a server has to know of its model."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from ..chat_template import ChatTemplate
from ..tokenizer import Tokenizer
from .errors import ApiError

if TYPE_CHECKING:
    from ..model_runner import ModelRunner


@frozen(kw_only=True, eq=False)
class ServedModel:
    """A model under its names; ``max_model_len`` is in tokens, ``created`` in seconds since 1970."""

    names: tuple[str, ...] = field(converter=tuple)
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    created: int = field(factory=lambda: int(time.time()))

    @classmethod
    def of(cls, runner: ModelRunner, names: Sequence[str] = ()) -> ServedModel:
        """The model of a runner that is ready."""
        loaded, max_model_len = runner.loaded, runner.config.max_model_len
        assert isinstance(max_model_len, int), "the configuration of a loaded runner is resolved"
        return cls(
            names=tuple(names) or (runner.config.model,),
            tokenizer=loaded.tokenizer if loaded is not None else None,
            chat_template=loaded.chat_template if loaded is not None and loaded.chat_template.exists else None,
            eos_token_ids=loaded.eos_token_ids if loaded is not None else (),
            vocab_size=runner.spec.vocab_size,
            max_model_len=max_model_len,
        )

    @property
    def name(self) -> str:
        """What answers call it."""
        return self.names[0]

    def require_name(self, name: str | None) -> None:
        """Raises:
        ApiError: 404 for a name that the model does not go by.
        """
        if name is not None and name not in self.names:
            message = f"the model {name!r:.200} is not served here; there is {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def require_tokenizer(self, param: str) -> Tokenizer:
        """Raises:
        ApiError: 400 if the model has none; ``param`` is the field that needs it.
        """
        if self.tokenizer is None:
            message = f"{param}: this model has no tokenizer; give the prompt of a completion as token ids"
            raise ApiError(400, message, param=param, code="no_tokenizer")
        return self.tokenizer

    def require_chat_template(self) -> ChatTemplate:
        """Raises:
        ApiError: 400 if the model has none.
        """
        if self.chat_template is None:
            message = "messages: this model has no chat template; use /v1/completions with the prompt as text"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        return self.chat_template

    def template_reads(self, name: str) -> bool:
        """Whether the chat template says a word; what it never names changes nothing in a prompt.

        Raises:
            ApiError: 400 if the model has none.
        """
        word = re.compile(rf"\b{re.escape(name)}\b")
        return any(word.search(source) for source in self.require_chat_template().sources.values())
