"""One forward after the other on a workspace, whatever threads, CUDA streams and graphs they come from."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MegaMoEError


def _slow_handle(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# torch.cuda.current_stream() and is_current_stream_capturing() in a fraction of their time.
_current_handle = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_handle)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

MOST_CAPTURES = 16
"""Captures that are remembered: more than are ever under way at once."""


@dataclass
class _Capture:
    """A graph capture with forwards in it. last: stream of the newest one. record: the node that records the event."""

    last: torch.cuda.Stream
    record: Any = None
    after: tuple = ()  # the nodes that `record` depends on


class StreamOrder:
    """The order of a workspace's forwards in one process. Its users hold `lock` from enter() to leave().

    Forwards share buffers, so the next may only start when the one before has ended. A forward on another stream
    waits for an event that is recorded behind the one before. In a graph capture the event is external: the graph
    waits for it in front of its first forward and records it after its last, at every replay, so replays too keep the
    order of their launches. Forwards within one capture follow each other by edges of the graph.

    As long as there is no capture, and torch made the stream, the event is recorded when the stream changes only.
    What this cannot see: a capture begun on the stream of the last forward without waiting for the device, which
    torch.cuda.graph does; that forward is then not ordered with replays on other streams.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last forward outside captures
        self._handle = -1  # of _stream, kept because reading it costs as much as the rest
        self._always = False  # whether the event is recorded after every forward
        self._captures: dict[int, _Capture] = {}
        self._capture: _Capture | None = None  # the one that the forward between enter() and leave() belongs to

    def prepare(self, device: torch.device) -> None:
        """Make the event, on the current stream of `device`. Call once before the first forward."""
        if self._event is None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def enter(self, device: torch.device) -> int:
        """Let what is launched next on the current stream of `device`, the current one, follow the forward before.

        Returns the stream's handle.
        """
        handle = _current_handle(device.index)
        if _is_capturing():
            self._enter_capture(torch.cuda.current_stream(device))
            return handle
        self._capture = None
        if handle != self._handle:
            self._change(torch.cuda.current_stream(device), handle)
        elif self._always:  # a replay that nobody here saw may have come in between
            self._stream.wait_event(self._event)
        return handle

    def leave(self) -> None:
        """Note that the forward of the last enter() was launched."""
        if self._capture is not None:
            self._leave_capture(self._capture)
        elif self._always:
            self._event.record(self._stream)

    def _change(self, stream: torch.cuda.Stream, handle: int) -> None:
        if not self._always and self._stream is not None:
            if self._last_is_capturing():
                text = "the stream of the forward before is being captured in a graph by another thread"
                raise MegaMoEError(f"a forward cannot be ordered behind the one before: {text}; wait for its end")
            self._event.record(self._stream)
        stream.wait_event(self._event)
        self._stream, self._handle = stream, handle
        # A stream that torch did not make (its id is its handle) may be gone when the next forward comes.
        self._always |= handle != 0 and stream.stream_id == handle

    def _last_is_capturing(self) -> bool:
        with torch.cuda.stream(self._stream):
            return _is_capturing()

    def _enter_capture(self, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import driver

        number, _, _ = _capture_info(stream)
        found = self._captures.get(number)
        if found is None:
            if not self._always and self._stream is not None and not self._last_is_capturing():
                self._event.record(self._stream)
            external = driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL
            _call("cuStreamWaitEvent", driver.CUstream(stream.cuda_stream), self._raw_event(), external)
            found = self._captures[number] = _Capture(stream)
            self._always = True
            if len(self._captures) > MOST_CAPTURES:
                del self._captures[next(iter(self._captures))]
        else:
            self._captures[number] = self._captures.pop(number)  # the newest again: the oldest is forgotten first
            if found.last.cuda_stream != stream.cuda_stream:
                stream.wait_event(found.last.record_event())
        self._capture, found.last = found, stream

    def _leave_capture(self, capture: _Capture) -> None:
        """Let the graph record the event after this forward, beside what follows on the stream."""
        _, graph, nodes = _capture_info(capture.last)
        if capture.record is None:
            (capture.record,) = _call("cuGraphAddEventRecordNode", graph, nodes, len(nodes), self._raw_event())
        else:  # an edge that is there cannot be added
            old, new = {int(node) for node in capture.after}, {int(node) for node in nodes}
            _edges("cuGraphAddDependencies", graph, [n for n in nodes if int(n) not in old], capture.record)
            _edges("cuGraphRemoveDependencies", graph, [n for n in capture.after if int(n) not in new], capture.record)
        capture.after = nodes

    def _raw_event(self) -> Any:
        from cuda.bindings import driver

        return driver.CUevent(self._event.cuda_event)


def _call(name: str, *args: Any) -> tuple:
    """What a driver function returns after its CUresult. Raises MegaMoEError naming both."""
    from cuda.bindings import driver

    result = getattr(driver, name)(*args)
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise MegaMoEError(f"capturing a forward in a CUDA graph: {name} gave {result[0].name}")
    return result[1:]


def _edges(name: str, graph: Any, nodes: list, to: Any) -> None:
    """Add or remove edges from nodes to one node."""
    from cuda.bindings import driver

    if not nodes:
        return
    name = f"{name}_v2" if hasattr(driver, f"{name}_v2") else name  # the one with edge data, as CUDA 13 has it only
    _call(name, graph, nodes, [to] * len(nodes), None, len(nodes))


def _capture_info(stream: torch.cuda.Stream) -> tuple[int, Any, tuple]:
    """Number of the capture that a stream takes part in, its graph, and the nodes that the next one will follow."""
    from cuda.bindings import driver

    status, number, graph, nodes, *_ = _call("cuStreamGetCaptureInfo", driver.CUstream(stream.cuda_stream))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise MegaMoEError(f"the graph capture of this stream has failed before: {status.name}")
    return int(number), graph, tuple(nodes)
