"""Text to tokens and back, around one tokenizer and its chat template.

What a person wrote never becomes a control token: the template is rendered around placeholders, and the pieces of the
template (where ``<|im_end|>`` is one token) are encoded apart from the texts (where it is eight characters):

    <|im_start|>user\\n | 3 + 4 = ? | <|im_end|>\\n<|im_start|>assistant\\n | 7 | <|im_end|>
    template          | text      | template                          |   completion

The completion's last token ends the turn. It is an action like any other, also where its id is the padding's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlcore.chat_template import TEMPLATE_FIX, assistant_turn, encode, template_pieces, texts_as_rendered
from rlcore.errors import ModelError
from rlcore.types import Message

_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "spiece.model", "*.bpe.model", "vocab.*", "*.tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatTokenizer:
    """A tokenizer that knows its chat template, its end-of-sequence ids and which tokens are control tokens.

    ``eos_ids``: every id that ends a completion. ``end_of_turn``: what the template writes after an assistant's
    words, up to and with the first EOS id. ``special_tokens``: the control tokens, text to id. ``prefill``: what the
    generation prompt puts into the assistant's mouth (``<think>\\n``), so completions do not contain it.
    """

    backend: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    end_of_turn: tuple[int, ...]
    special_tokens: Mapping[str, int]
    prefill: str

    def is_same_as(self, other: ChatTokenizer) -> bool:
        """Whether both turn every text into the same ids, and end completions with the same."""
        return self.eos_ids == other.eos_ids and self.backend.get_vocab() == other.backend.get_vocab()

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Load from a checkpoint's folder and check the template's round trip.

        Raises:
            ModelError: no tokenizer, no chat template, no EOS id, or a template that does not survive the round trip.
        """
        backend = load_backend(folder)
        eos_ids = read_eos_ids(folder, backend)
        prefill, end_of_turn = assistant_turn(backend, eos_ids)
        tokenizer = cls(
            backend=backend,
            eos_ids=eos_ids,
            end_of_turn=end_of_turn,
            special_tokens=special_tokens_of(backend),
            prefill=prefill,
        )
        check_template(tokenizer)
        return tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; a model's embedding may have more rows."""
        return len(self.backend)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text in which nothing is a control token.

        Raises:
            ModelError: a control token came out all the same.
        """
        ids = encode(self.backend, text, is_template=False)
        controls = set(ids) & set(self.special_tokens.values())
        if controls:
            raise ModelError(
                f"the tokenizer makes the control tokens {sorted(controls)} of plain text: {text[:80]!r}",
                where=str(self.backend.name_or_path),
                fix="remove that text from the data, or use a tokenizer that can spell it",
            )
        return ids

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of what a template writes, control tokens among them."""
        return encode(self.backend, text, is_template=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without control tokens."""
        return _decode(self.backend, ids, skip_special_tokens=True)

    def render_prompt(self, messages: Sequence[Message], *, tools: str = "") -> tuple[int, ...]:
        """Token ids of a conversation, ending with the generation prompt; ``tools``: as in :class:`Prompt`.

        Raises:
            ModelError: the template refuses the conversation, or drops or rewrites a message.
        """
        pieces = template_pieces(self.backend, [message.role for message in messages], tools=tools)
        texts = texts_as_rendered(self.backend, messages, pieces, tools=tools)
        ids: tuple[int, ...] = ()
        for piece, text in zip_longest(pieces, texts, fillvalue=""):
            ids += self.encode_template(piece) + self.encode(text)
        return ids

    def rendered_texts(self, messages: Sequence[Message]) -> list[str]:
        """The messages' texts as the template writes them: unchanged, or without the white space around them.

        Raises:
            ModelError: as :meth:`render_prompt`.
        """
        pieces = template_pieces(self.backend, [message.role for message in messages])
        return texts_as_rendered(self.backend, messages, pieces)

    def render_demonstration(
        self, messages: Sequence[Message], completion: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of a prompt, exactly as at sampling time, and of the answer with the end of its turn.

        Raises:
            ModelError: as :meth:`render_prompt`, or the completion does not begin with the template's ``prefill``.
        """
        if not completion.startswith(self.prefill):
            raise ModelError(
                f"the generation prompt ends with {self.prefill!r}, so a completion must begin with it, "
                f"and this one begins with {completion[:40]!r}",
                where=str(self.backend.name_or_path),
                fix="add the reasoning to the demonstrations, or name a template without it in model.chat_template",
            )
        answer = self.encode(completion.removeprefix(self.prefill))
        return self.render_prompt(messages), answer + self.end_of_turn


def load_backend(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint's folder, with a chat template.

    Raises:
        ModelError: missing or damaged tokenizer, missing chat template.
    """
    require_vocabulary(folder)
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(
            f"the tokenizer cannot be loaded: {error}",
            where=str(folder),
            fix="the folder must hold tokenizer.json and tokenizer_config.json beside the weights",
        ) from error
    if not backend.chat_template:
        absent = [name for name in ("chat_template.jinja", "tokenizer_config.json") if not (folder / name).is_file()]
        without = f": the folder has no {' and no '.join(absent)}" if absent else ""
        raise ModelError(f"the tokenizer has no chat template{without}", where=str(folder), fix=TEMPLATE_FIX)
    return backend


def require_vocabulary(folder: Path) -> None:
    """Raises ModelError where a model's folder has no file of a tokenizer: libraries make an empty one then."""
    if not any(list(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ModelError(
            "the model's folder has no tokenizer.json",
            where=str(folder),
            fix="copy tokenizer.json and tokenizer_config.json from where the weights came from",
        )


def read_eos_ids(folder: Path, backend: PreTrainedTokenizerBase, *, optional: bool = False) -> tuple[int, ...]:
    """Every end-of-sequence id: those of the generation configuration (else of the model's), then the tokenizer's.

    Raises:
        ModelError: there is none, and it is not ``optional``.
    """
    declared = _read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(folder / "config.json").get("eos_token_id")
    ids = [*(declared if isinstance(declared, list) else [declared]), backend.eos_token_id]
    known = [number for number in ids if number is not None]
    if not all(type(number) is int and number >= 0 for number in known):
        raise ModelError(
            f"eos_token_id has something else than token ids: {known}",
            where=str(folder / "generation_config.json"),
            fix="name whole numbers, 0 or more",
        )
    unique = tuple(dict.fromkeys(known))
    if not unique and not optional:
        raise ModelError(
            "no end-of-sequence id is declared, so no completion would ever end",
            where=str(folder / "generation_config.json"),
            fix="name the control token that ends a turn in model.extra_eos",
        )
    return unique


def check_template(tokenizer: ChatTokenizer) -> None:
    """Prove on a probe that messages survive the round trip and that text cannot end a turn.

    Raises:
        ModelError: they do not.
    """
    backend = tokenizer.backend
    end_text = backend.convert_ids_to_tokens(tokenizer.end_of_turn[-1])
    question, answer = f"Is 3 + 4 = 7? {end_text}", "Yes, it is."
    probe = [Message(role="user", content=question)]
    prompt_ids, completion_ids = tokenizer.render_demonstration(probe, tokenizer.prefill + answer)
    problems = []
    if question not in _decode(backend, prompt_ids, skip_special_tokens=False):
        problems.append(f"the message {question!r} does not survive encoding and decoding")
    if tokenizer.decode(completion_ids).strip() != answer:
        problems.append(f"the answer {answer!r} comes back as {tokenizer.decode(completion_ids)!r}")
    if problems:
        raise ModelError(
            "the tokenizer or its chat template fails the round trip: " + "; ".join(problems),
            where=str(backend.name_or_path),
            fix=TEMPLATE_FIX,
        )


def _decode(backend: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def special_tokens_of(backend: PreTrainedTokenizerBase) -> dict[str, int]:
    """The control tokens of a tokenizer, text to id."""
    named = dict(zip(backend.all_special_tokens, backend.all_special_ids, strict=True))
    return named | {token.content: number for number, token in backend.added_tokens_decoder.items() if token.special}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"the file is not valid JSON: {error}", where=str(path)) from error
    return document
