"""Names that call-style programs may use without an import, as on LeetCode.

A program that uses ``List`` or ``deque`` without an import is correct there. A whole script must import its names.
"""

from __future__ import annotations

_MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys"
_FROM = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby "
    "islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "math": "ceil comb dist exp factorial floor fsum gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sqrt",
    "operator": "add and_ itemgetter mul or_ sub xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping "
    "NamedTuple NoReturn Optional Sequence Set Tuple Type TypeVar Union",
}
USUAL_NAMES = dict.fromkeys(_MODULES.split(), "") | {
    name: home for home, names in _FROM.items() for name in names.split()
}
"""Maps each name to its module; empty if the name is a module."""
