"""A script inside a box, run as a program of its own would be. Like ``runner``, it goes there as bytes.

Its input comes through a pipe on descriptor 0 and its output goes through one on descriptor 1, each with a thread at
the other end, for either may be more than a pipe holds.
"""

from __future__ import annotations

import _thread
import posix
import sys
from collections.abc import Callable
from typing import IO, Any

PROGRAM = "<program>"
# Out of the way of the descriptors that programs use: what a script is still to read, and what it has printed.
_TO_SCRIPT, _FROM_SCRIPT = 32, 33
_FIRST_OF_OURS = 30
_TEXT = 2_000


def run_script(code: str, stdin: str, most: int) -> tuple[Any, ...]:
    """``("printed", stdout)``, ``("raised", name, text, stdout)`` or ``("too large", why)``, at the end of a script."""
    _thread.stack_size(0)  # the last script's own would hold for our threads too
    sys.modules.pop("fileinput", None)  # it refuses to begin anew
    fed, printed = _feed(stdin.encode("utf-8", "surrogatepass")), _catch(most)
    _set_streams(_opened(0), _opened(1), _opened(2))
    namespace, error = fresh_namespace("__main__"), None
    try:
        exec(compile(code, PROGRAM, "exec", dont_inherit=True), namespace)
    except SystemExit:
        pass  # the usual way to end a program early
    except BaseException as raised:  # noqa: BLE001 - whatever a program raises is data
        error = raised
    said = () if error is None else described(error)
    _end_script(namespace)
    fed()
    data = printed()
    if len(data) > most:
        return ("too large", f"it printed more than {most} bytes")
    text = data.decode("utf-8", "replace")
    return ("raised", *said, text) if said else ("printed", text)


def _end_script(namespace: dict[str, Any]) -> None:
    """What Python does at the end of a program: wait for threads, call exit handlers, write out what is buffered."""
    threading, atexit, signal = (sys.modules.get(name) for name in ("threading", "atexit", "_signal"))
    steps: list[Callable[[], object]] = [
        lambda: _join_all(threading) if threading else None,
        lambda: atexit._run_exitfuncs() if atexit else None,
        lambda: sys.stdout.flush(),
        lambda: sys.__stdout__.flush() if sys.__stdout__ else None,
        lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN) if signal else None,  # we write to it after the program
        namespace.clear,  # files that it left open are written out
    ]
    for step in steps:
        try:  # noqa: SIM105 - contextlib takes long to import
            step()
        except BaseException:  # noqa: BLE001 - as at the end of a program, nobody is told
            pass
    _set_streams(None, None, None)  # one that the program made closes its descriptor as it goes
    clear_descriptors()
    posix.closerange(3, _FIRST_OF_OURS)


def _opened(descriptor: int) -> IO[Any]:
    mode, errors = ("w", "backslashreplace") if descriptor else ("r", "surrogateescape")
    return open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)


def _set_streams(*streams: IO[Any] | None) -> None:
    """Under both of their names: a program that wraps the buffer of one lets go of the first."""
    for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _join_all(threading: Any) -> None:
    own = threading.current_thread()
    while waiting := [one for one in threading.enumerate() if one is not own and not one.daemon]:
        waiting[0].join()


def _feed(data: bytes) -> Callable[[], object]:
    """Give ``data`` to whoever reads descriptor 0; what is returned waits for the end, when nobody reads any more."""
    _pipe_to(0, _TO_SCRIPT)

    def pour() -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[posix.write(_TO_SCRIPT, view) :]
        except OSError:
            pass  # nobody reads it any more
        posix.close(_TO_SCRIPT)

    return _begin(pour)


def _catch(most: int) -> Callable[[], bytes]:
    """Collect what is written to descriptor 1; what is returned waits for its end and gives ``most`` bytes, or more."""
    _pipe_to(1, _FROM_SCRIPT)
    parts = []

    def drain() -> None:
        kept = 0
        while part := posix.read(_FROM_SCRIPT, 1 << 16):
            if kept <= most:
                parts.append(part)
                kept += len(part)
        posix.close(_FROM_SCRIPT)

    ended = _begin(drain)

    def all_of_it() -> bytes:
        ended()
        return b"".join(parts)

    return all_of_it


def _pipe_to(descriptor: int, ours: int) -> None:
    """A pipe between ``descriptor`` and a number of ours; 0 reads from it, 1 writes to it."""
    ends = posix.pipe()
    for end, number in zip(ends if descriptor == 0 else ends[::-1], (descriptor, ours), strict=True):
        posix.dup2(end, number)
        posix.close(end)


def _begin(work: Callable[[], None]) -> Callable[[], object]:
    """Run ``work`` in a thread; what is returned waits for its end."""
    is_over = _thread.allocate_lock()
    is_over.acquire()

    def run() -> None:
        try:
            work()
        finally:
            is_over.release()

    _thread.start_new_thread(run, ())
    return is_over.acquire


def clear_descriptors() -> None:
    """Point descriptors 0, 1 and 2 at nothing."""
    null = posix.open("/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        posix.dup2(null, descriptor)
    if null > 2:
        posix.close(null)


def fresh_namespace(name: str = "__main__") -> dict[str, Any]:
    """The names of a new module, where dataclasses and type hints look for what a program defines.

    A program whose function is called is no ``__main__`` to itself.
    """
    module = type(sys)(name)
    sys.modules["__main__"] = sys.modules[name] = module
    return module.__dict__


def described(error: BaseException) -> tuple[str, str]:
    """Name and text of an exception, with the line of the program that raised it."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = str(error)[:_TEXT]
    except BaseException:  # noqa: BLE001 - whatever a program raises is data
        text = ""
    return type(error).__name__[:100], f"{text} (line {line})" if line else text
