"""Columns: what a feature keeps for each row of the request table, and the parameters that it reads from requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..fsm.errors import TwoStrokeError
from .errors import InvalidSamplingParams
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .request_table import RequestRecord


class Column(Protocol):
    """Per-request state of one feature, indexed by row of the request table.

    Rows never move: there is no swap and no condense to get wrong. A column must not assume that ``drop`` was called
    before ``add``; whatever the row held before, ``add`` leaves nothing of it.

    A request that is preempted loses its row and gets a fresh one when it is resumed. State that is to outlive that is
    keyed by the :class:`RequestRecord` (in a ``weakref.WeakKeyDictionary``: it then ends with the request).
    """

    def add(self, row: int, request: RequestRecord) -> None:
        """Take in what the feature needs of a request that was given ``row``."""
        ...

    def drop(self, row: int) -> None:
        """Set the row back to its defaults. Dropping an empty row changes nothing."""
        ...

    def flush(self) -> None:
        """Make what was added and dropped since the last flush visible to the device, in one go."""
        ...


@runtime_checkable
class ExtraParameters(Protocol):
    """What a column has beside if it reads ``SamplingParams.extra``: requests are refused for names that none knows."""

    @property
    def extra_parameters(self) -> Collection[str]:
        """The names that it reads."""
        ...

    def check(self, name: str, value: Any) -> None:
        """Look at one request's value, before anything is changed for that request; from any thread.

        Raises:
            ValueError, TypeError: the value won't do; the message becomes that of an :class:`InvalidSamplingParams`.
        """
        ...


class ColumnRefused(TwoStrokeError, RuntimeError):
    """Columns can't be changed: requests are live, the column is not there, or a parameter would have two readers."""


class NumberColumn:
    """A number of each request, from ``SamplingParams.extra[name]``: ``values[row]``, int64 or float64 ``[num_rows]``.

    ``default`` is for requests that give none; if it is an integer, integers are asked for. ``low`` and ``high`` are
    inclusive.
    """

    def __init__(
        self, name: str, num_rows: int, *, default: float, low: float = -math.inf, high: float = math.inf
    ) -> None:
        self.extra_parameters = (name,)
        self._default, self._low, self._high = default, low, high
        self._kinds = (int, np.integer) if isinstance(default, int) else (int, float, np.integer, np.floating)
        self.values: npt.NDArray[Any] = np.full(num_rows, default)

    def check(self, name: str, value: Any) -> None:
        """A number of the right kind, between the bounds."""
        if isinstance(value, bool) or not isinstance(value, self._kinds):
            raise TypeError(f"must be {'an integer' if isinstance(self._default, int) else 'a number'}, got {value!r}")
        if not self._low <= value <= self._high:
            raise ValueError(f"must be between {self._low} and {self._high}, got {value}")

    def add(self, row: int, request: RequestRecord) -> None:
        """The request's number, or the default."""
        self.values[row] = request.sampling_params.extra.get(self.extra_parameters[0], self._default)

    def drop(self, row: int) -> None:
        """The default."""
        self.values[row] = self._default

    def flush(self) -> None:
        """Nothing is staged: stages gather the values of their own rows."""


def readers_of_extra(columns: Iterable[Column]) -> dict[str, ExtraParameters]:
    """The column that reads each name of ``SamplingParams.extra``.

    Raises:
        ColumnRefused: two columns read one name.
    """
    readers: dict[str, ExtraParameters] = {}
    for column in columns:
        if not isinstance(column, ExtraParameters):
            continue
        for name in column.extra_parameters:
            if name in readers:
                raise ColumnRefused(
                    f"{type(column).__name__} reads the parameter {name!r}, and so does the column "
                    f"{type(readers[name]).__name__}; remove that one first, or choose another name"
                )
            readers[name] = column
    return readers


def check_extra(params: SamplingParams, readers: Mapping[str, ExtraParameters]) -> None:
    """Have each of ``params.extra`` checked by the column that reads it.

    Raises:
        InvalidSamplingParams: naming the key, which nobody reads, or what is wrong with its value.
    """
    for name, value in params.extra.items():
        label = f"extra[{name!r}]"
        if name not in readers:
            known = ", ".join(sorted(readers)) or "none"
            raise InvalidSamplingParams(
                label, f"no column of this runner reads it (known: {known}); see ModelRunner.add_column"
            )
        try:
            readers[name].check(name, value)
        except InvalidSamplingParams:
            raise
        except (ValueError, TypeError) as error:
            raise InvalidSamplingParams(label, str(error)) from error
