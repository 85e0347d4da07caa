"""Names that are there without an import where a function is called: those that LeetCode's Python has.

A program that uses ``List`` or ``deque`` as its platform taught it is no wrong program. A whole script has to import
what it uses, as everywhere.
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
"""By name: the module that has it, or nothing where it is one."""
