"""One forward after the other on a workspace, whatever threads and CUDA streams they come from."""

from __future__ import annotations

import threading

import torch

from ..errors import MegaMoEError


def _slow_handle(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The CUstream of a device's current stream, in a tenth of the time that torch.cuda.current_stream() takes.
_current_handle = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_handle)


class StreamOrder:
    """The order of one rank's forwards across CUDA streams. Its users hold `lock` from enter() to leave().

    Forwards of one workspace share buffers, so the next may only start after the one before. On one stream they
    do; where the stream changes, the new one waits for an event of the old one. Inside a graph capture the event
    becomes an edge between forwards of that capture. What no call here sees is when a graph is replayed: a replay is
    ordered with the other work of the stream on which it is launched, and with nothing else.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        self._handle = -1  # of _last, kept because reading it costs as much as the rest
        self._done: torch.cuda.Event | None = None  # recorded after the last forward if its stream may be destroyed
        self._captured: tuple[int, torch.cuda.Stream] | None = None  # the capture and stream of the last captured one

    def enter(self, device: torch.device) -> int:
        """Let what is launched next on the current stream of `device`, the current one, follow the forward before.

        Returns the stream's handle.
        """
        handle = _current_handle(device.index)
        if torch.cuda.is_current_stream_capturing():
            self._enter_capture(torch.cuda.current_stream(device), handle)
        elif handle != self._handle:
            self._change(torch.cuda.current_stream(device), handle)
        return handle

    def leave(self) -> None:
        """Note that the forward of the last enter() was launched."""
        if self._done is not None and self._last is not None and not torch.cuda.is_current_stream_capturing():
            self._done.record(self._last)

    def _change(self, stream: torch.cuda.Stream, handle: int) -> None:
        if self._done is not None:
            stream.wait_event(self._done)
        elif self._last is not None:
            with torch.cuda.stream(self._last):
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:
                text = "the stream of its last forward is being captured in a graph by another thread"
                raise MegaMoEError(f"a forward cannot be ordered behind the one before: {text}; wait for its end")
            stream.wait_event(self._last.record_event())
        self._last, self._handle = stream, handle
        # A stream that torch did not make (its id is its handle) may be gone when the next forward comes.
        foreign = handle != 0 and stream.stream_id == handle
        self._done = torch.cuda.Event() if foreign else None

    def _enter_capture(self, stream: torch.cuda.Stream, handle: int) -> None:
        capture = _capture_id(handle)
        before, self._captured = self._captured, (capture, stream)
        if before is not None and before[0] == capture and before[1].cuda_stream != handle:
            stream.wait_event(before[1].record_event())


def _capture_id(handle: int) -> int:
    """The number of the capture that a stream takes part in."""
    from cuda.bindings import driver

    found = driver.cuStreamGetCaptureInfo(driver.CUstream(handle))
    if found[0] != driver.CUresult.CUDA_SUCCESS:
        raise MegaMoEError(f"cuStreamGetCaptureInfo: {found[0].name}")
    return int(found[2])
