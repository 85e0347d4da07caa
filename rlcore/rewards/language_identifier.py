"""Language identification by py3langid (naive Bayes over byte n-grams). Only this file imports it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from rlcore.errors import ConfigError

# Candidate languages, each tested on answers of three words and more. Without this restriction, one of the
# hundred others wins for some short texts.
# fmt: off
LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "fi", "pl", "cs", "hu", "ro", "tr", "vi", "id", "ru", "uk",
    "bg", "el", "ar", "fa", "he", "hi", "th", "ko", "zh", "ja",
)
# fmt: on
_NO_LANGUAGE = re.compile(r"\\[A-Za-z]+|[\d$+=^_{}*/\\<>|&#~\[\]()-]+")  # LaTeX commands, digits, signs


@lru_cache(maxsize=1)
def open_identifier() -> Callable[[str], str]:
    """Return a deterministic function that maps a text to its most likely code of ``LANGUAGES``.

    Loading takes a second and 120 MiB once per process; a text of a few hundred words takes half a millisecond.

    Raises:
        ConfigError: py3langid is not installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            'identifier = "py3langid" needs the package py3langid, which is not installed',
            where="the reward language",
            fix="pip install py3langid, or identifier = 'words'",
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(list(LANGUAGES))

    def identify(text: str) -> str:
        return str(identifier.classify(" ".join(_NO_LANGUAGE.sub(" ", text).split()))[0])

    return identify
