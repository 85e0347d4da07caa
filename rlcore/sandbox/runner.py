"""The program inside a box. It is never imported there: its code and that of ``wire`` arrive as bytes on descriptor 0.

Bootstrap (see ``box.py``) binds ``encode`` and ``decode``, then runs this module, which limits the process, says READY
and serves. Only posix and resource are imported: json and struct would double the time to start. Nothing here guards
anything. A candidate may rewrite all of it, because whatever is sent from here is data, compared outside.

As ``candidate`` it takes requests ``(verb, …)`` and answers each with one frame:

    ("load", code)                 → ("done",) | ("raised", name, text)
    ("call", name, args, kwargs)   → ("value", value) | ("raised", name, text)
    ("script", code, stdin)        → ("printed", stdout) | ("raised", name, text, stdout)

What is no plain data becomes ("refused", why), what is more than fits into a frame ("too large", why).
As ``tester`` it takes one request ``(nonce, entry_point, prelude, tests)``, asks ``("call", args, kwargs)`` as often as
the tests do and answers each test with ``("verdict", nonce, verdict, text)``.
"""

from __future__ import annotations

import _thread
import builtins
import io
import posix
import resource
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rlcore.sandbox.wire import MAX_FRAME_BYTES, WireError, WireLimitError, decode, encode

READY = b"READY"
PROGRAM = "<program>"
_IN, _OUT = 30, 31  # of 32 descriptors that a box may have: out of the way of those that programs use
_TEXT = 2_000
# The first cannot be made of a text; the others would end the loop of a test that calls the program by map or iter.
_NOT_PASSED_ON = (UnicodeError, StopIteration, StopAsyncIteration)


def main(role: str, memory_bytes: int, cpu_seconds: int) -> NoReturn:
    """Limit this process, say READY, and serve ``role`` (``candidate`` or ``tester``) until the box is killed."""
    _take_channel()
    # As the module site would, which is left out and has a class for them.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    _limit(memory_bytes, cpu_seconds)
    _send_bytes(READY)
    if role == "tester":
        _serve_tests(*_receive())
    while True:
        _send(_answer(*_receive()))


def _take_channel() -> None:
    posix.dup2(0, _IN)
    posix.dup2(1, _OUT)
    null = posix.open("/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        posix.dup2(null, descriptor)
    posix.close(null)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 8 << 20,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 16,  # threads: there is no fork
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_SIGPENDING: 16,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    # The soft limit sends SIGXCPU, by which the caller knows why the process ended; the hard one is for who ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def _answer(verb: str, *arguments: Any) -> tuple[Any, ...]:
    verbs: dict[str, Callable[..., tuple[Any, ...]]] = {"load": _load, "call": _call, "script": _script}
    return verbs[verb](*arguments)


def _load(code: str) -> tuple[Any, ...]:
    try:
        exec(compile(code, PROGRAM, "exec", dont_inherit=True), _fresh_namespace())
    except SystemExit:
        pass  # what it has defined by then is there: the usual last line below __name__ == "__main__"
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return ("raised", *_described(error))
    return ("done",)


def _call(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    try:
        return ("value", getattr(sys.modules["__main__"], name)(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return ("raised", *_described(error))


def _script(code: str, stdin: str) -> tuple[Any, ...]:
    _feed(stdin.encode("utf-8", "surrogatepass"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout = sys.stderr = output = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    error: BaseException | None = None
    try:
        exec(compile(code, PROGRAM, "exec", dont_inherit=True), _fresh_namespace())
    except SystemExit:
        pass  # the usual way to end a program early
    except BaseException as raised:  # noqa: BLE001 - whatever a program raises is data
        error = raised
    printed = output.buffer.getvalue().decode("utf-8", "replace")
    return ("printed", printed) if error is None else ("raised", *_described(error), printed)


def _feed(data: bytes) -> None:
    """Give ``data`` to whoever reads descriptor 0; what does not fit into a pipe is poured after by a thread."""
    read_end, write_end = posix.pipe()
    posix.dup2(read_end, 0)
    posix.close(read_end)
    posix.set_blocking(write_end, False)
    if data:  # a new pipe has room for some
        data = data[posix.write(write_end, data) :]
    if not data:
        posix.close(write_end)
        return
    posix.set_blocking(write_end, True)
    _thread.start_new_thread(_pour, (write_end, data))


def _pour(write_end: int, data: bytes) -> None:
    try:
        while data:
            data = data[posix.write(write_end, data) :]
    except OSError:
        pass  # the next input has taken the place of this one, or the program has closed it
    posix.close(write_end)


def _serve_tests(nonce: str, entry_point: str, prelude: str, tests: list[str]) -> NoReturn:
    namespace = _fresh_namespace()
    try:
        exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        _send(("verdict", nonce, "infra", "the prelude raised " + ": ".join(_described(error))))
        tests = []
    for test in tests:
        namespace |= {entry_point: _proxy, "candidate": _proxy}
        _send(("verdict", nonce, *_judged(test, namespace)))
    posix._exit(0)


def _judged(test: str, namespace: dict[str, Any]) -> tuple[str, str]:
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
    except AssertionError as error:
        return "fail", ": ".join(_described(error))
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return "error", ": ".join(_described(error))
    return "pass", ""


def _proxy(*args: Any, **kwargs: Any) -> Any:
    """The candidate, as the tests see it: plain data goes there and plain data, or a builtin exception, comes back."""
    _send(("call", list(args), kwargs))
    kind, *rest = _receive()
    if kind == "value":
        return rest[0]
    raise _exception(rest[0])(rest[1])


def _exception(name: str) -> Callable[[str], Exception]:
    kind = getattr(builtins, name, None)
    is_simple = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_PASSED_ON)
    return kind if is_simple else RuntimeError  # type: ignore[return-value]  # checked in the line before


def _fresh_namespace() -> dict[str, Any]:
    """The names of a new ``__main__``, where dataclasses and type hints look for what a program defines."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def _described(error: BaseException) -> tuple[str, str]:
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


def _receive() -> Any:
    return decode(_read(int.from_bytes(_read(4), "big")))


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = posix.read(_IN, min(count, 1 << 16))
        if not part:
            posix._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(message: tuple[Any, ...]) -> None:
    try:
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise WireLimitError(f"{len(data)} bytes are more than {MAX_FRAME_BYTES}")
    except WireLimitError as error:
        data = encode(("too large", str(error)))
    except (WireError, RecursionError) as error:
        data = encode(("refused", str(error)))
    _send_bytes(data)


def _send_bytes(data: bytes) -> None:
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[posix.write(_OUT, data) :]
