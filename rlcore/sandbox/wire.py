"""Plain data as bytes, for messages to and from a box. It runs on both sides and imports nothing, so boxes start fast.

One letter encodes the type, and a size precedes the content: ``l2:i1,i2,`` is ``[1, 2]``. Only None, bool, int, float,
str, bytes, list, tuple, set and dict can be encoded. Objects with a custom ``__eq__``, code and pickles cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_FRAME_BYTES = 1 << 20  # of an answer
MAX_REQUEST_BYTES = 64 << 20
MAX_DEPTH = 45
MAX_HASHED_ITEMS = 2_000  # a set of 20,000 multiples of 2**61 - 1 took ten seconds to build


_ITEMS_PER_CHECK = 1_024  # decoded items between two checks of the time


class WireError(Exception):
    """Malformed bytes, or a value that is not plain data."""


class WireLimitError(WireError):
    """Plain data that is too deep or too large."""


def encode(value: Any, depth: int = 0, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Encode a value whose texts and lists have at most ``max_bytes`` bytes or items.

    A subclass of a plain type is encoded as that type (a ``Counter`` as a dict).

    Raises:
        WireError: The value has another type.
        WireLimitError: The data is too deep or too large.
    """
    if depth > MAX_DEPTH:
        raise WireLimitError(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return {None: b"N", True: b"T", False: b"F"}[value]
    if isinstance(value, int):
        return b"i%x," % value if value >= 0 else b"i-%x," % -value  # hexadecimal has no limit of digits
    if isinstance(value, float):
        return b"f" + float.hex(value).encode() + b","
    if isinstance(value, str):
        return _sized(b"s", str.encode(value, "utf-8", "surrogatepass"), max_bytes)
    if isinstance(value, bytes | bytearray):
        return _sized(b"b", bytes(value), max_bytes)
    return _encode_many(value, depth + 1, max_bytes)


def decode(data: bytes, check: Callable[[], None] = lambda: None) -> Any:
    """Decode a value of :func:`encode`, calling ``check`` now and then, which may raise.

    Raises:
        WireError: The bytes are malformed.
    """
    try:
        value, end = _decode(data, 0, 0, check)
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise WireError(f"malformed data: {type(error).__name__}") from error
    if end != len(data):
        raise WireError("data after the end")
    return value


def _sized(tag: bytes, data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise WireLimitError(f"a text of {len(data)} bytes is larger than {max_bytes}")
    return tag + b"%d:" % len(data) + data


def _encode_many(value: Any, depth: int, max_bytes: int) -> bytes:
    if isinstance(value, dict):
        items = [part for pair in dict.items(value) for part in pair]
        return _joined(b"d", _bounded(len(items) // 2), items, depth, max_bytes)
    if isinstance(value, set | frozenset):
        return _joined(b"t", _bounded(len(value)), value, depth, max_bytes)
    if isinstance(value, list):
        return _joined(b"l", len(value), value, depth, max_bytes)
    if isinstance(value, tuple):
        return _joined(b"u", len(value), value, depth, max_bytes)
    raise WireError(f"a {type(value).__name__} is not plain data")


def _joined(tag: bytes, count: int, items: Any, depth: int, max_bytes: int) -> bytes:
    if count > max_bytes:
        raise WireLimitError(f"{count} items are too many")
    return tag + b"%d:" % count + b"".join([encode(item, depth, max_bytes) for item in items])


def _bounded(count: int) -> int:
    if count > MAX_HASHED_ITEMS:
        raise WireLimitError(f"a set or dict of more than {MAX_HASHED_ITEMS} items")
    return count


def _decode(data: bytes, at: int, depth: int, check: Callable[[], None]) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH} levels")
    tag, at = data[at : at + 1], at + 1
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag in (b"i", b"f"):
        end = data.index(b",", at)
        text = data[at:end].decode()
        return (int(text, 16) if tag == b"i" else float.fromhex(text)), end + 1
    colon = data.index(b":", at, at + 9)
    size, at = int(data[at:colon]), colon + 1
    if not 0 <= size <= len(data) - at:  # an item takes a byte at least
        raise WireError("a size beyond the end of the data")
    if tag in (b"s", b"b"):
        part = data[at : at + size]
        return (part.decode("utf-8", "surrogatepass") if tag == b"s" else part), at + size
    count = 2 * _bounded(size) if tag == b"d" else _bounded(size) if tag == b"t" else size
    items = []
    for number in range(count):
        if number % _ITEMS_PER_CHECK == 0:
            check()
        item, at = _decode(data, at, depth + 1, check)
        items.append(item)
    return _made(tag, items), at


def _made(tag: bytes, items: list[Any]) -> Any:
    if tag == b"d":
        return dict(zip(items[::2], items[1::2], strict=True))
    makers: dict[bytes, Any] = {b"l": list, b"u": tuple, b"t": set}
    if tag not in makers:
        raise WireError("an unknown type")
    return makers[tag](items)
