"""Who waits, who runs and who leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .scheduler_request import Request, RequestStatus


class RequestQueues:
    """The waiting queue and the running list, both in order of arrival.

    Every running request arrived before every waiting one: the running list only grows from the front of the waiting
    queue, and whoever has to give way is the last of the one and becomes the first of the other. So the oldest request
    always gets on, and with it, in time, everyone.

    ``leaving`` are requests that are finished while a step in flight still uses their blocks. The two ``undo`` methods
    leave out requests that were removed since.
    """

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, or were preempted."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the waiting queue."""
        self._waiting[request.req_id] = request

    def first_waiting(self) -> Request:
        """Whose turn it is next."""
        return next(iter(self._waiting.values()))

    def start_first(self) -> None:
        """Move the first waiting request to the end of the running list."""
        _, request = self._waiting.popitem(last=False)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def undo_starts(self, requests: Sequence[Request]) -> None:
        """Move the last requests that were started back to the front of the waiting queue."""
        for request in reversed(requests):
            if request.status is RequestStatus.RUNNING:
                self._put_first(request)
        self._drop_stopped()

    def preempt_last(self) -> Request:
        """Move the latest running request to the front of the waiting queue."""
        request = self.running.pop()
        self._put_first(request)
        return request

    def undo_preemptions(self, requests: Sequence[Request]) -> None:
        """Move the last requests that were preempted back to the end of the running list."""
        for request in reversed(requests):
            if request.status is RequestStatus.WAITING:
                del self._waiting[request.req_id]
                request.status = RequestStatus.RUNNING
                self.running.append(request)
            else:
                self.leaving.append(request)

    def remove(self, requests: Sequence[Request]) -> None:
        """Take requests out for good, wherever they are; they are leaving until :meth:`take_left`."""
        for request in requests:
            if request.status is RequestStatus.WAITING:
                del self._waiting[request.req_id]
            request.status = RequestStatus.FINISHED
        self.leaving.extend(requests)
        self._drop_stopped()

    def take_left(self) -> list[Request]:
        """Take out those of ``leaving`` whose blocks no step in flight uses any more."""
        left = [request for request in self.leaving if not request.is_in_flight]
        self.leaving = [request for request in self.leaving if request.is_in_flight]
        return left

    def _put_first(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting[request.req_id] = request
        self._waiting.move_to_end(request.req_id, last=False)

    def _drop_stopped(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
