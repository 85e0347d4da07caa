"""Text to tokens and back, around one tokenizer and its chat template.

What a person wrote never becomes a control token: the template is rendered around placeholders, and ``<|im_end|>`` is
one token where the template wrote it and eight characters where a person did. A conversation is encoded as one text,
so that its tokens are those that the model was trained on (``apply_chat_template``):

    <|im_start|>user\\n | 3 + 4 = ? | <|im_end|>\\n<|im_start|>assistant\\n | 7 | <|im_end|>
    template          | text      | template                          |   completion

The completion's last token ends the turn. It is an action like any other, also where its id is the padding's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.text.chat_template import TEMPLATE_FIX, AssistantTurn, assistant_turn, render, written
from rlcore.text.template_check import require_round_trip, require_same_tokens
from rlcore.text.text_parts import Author, Ids, Part, PartEncoder, control_tokens_of
from rlcore.types import Message

_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "spiece.model", "*.bpe.model", "vocab.*", "*.tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatTokenizer:
    """A tokenizer that knows its chat template, its end-of-sequence ids and which tokens are control tokens.

    ``eos_ids``: every id that ends a completion. ``turn``: what the template writes around an assistant's words.
    """

    hf_tokenizer: PreTrainedTokenizerBase
    encoder: PartEncoder
    eos_ids: tuple[int, ...]
    turn: AssistantTurn

    def is_same_as(self, other: ChatTokenizer) -> bool:
        """Whether both turn every text into the same ids, and end completions with the same."""
        return self.eos_ids == other.eos_ids and self.hf_tokenizer.get_vocab() == other.hf_tokenizer.get_vocab()

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Load from a checkpoint's folder, and check the template on conversations of several shapes.

        Raises:
            ModelError: no tokenizer, no chat template, no EOS id, or a template that does not survive the round trip
                or gives other tokens than its own library.
        """
        backend = load_backend(folder)
        tokenizer = cls.of(backend, read_eos_ids(folder, backend))
        require_round_trip(tokenizer)
        require_same_tokens(tokenizer)
        return tokenizer

    @classmethod
    def of(cls, backend: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> ChatTokenizer:
        """A tokenizer that is loaded already.

        Raises:
            ModelError: its template cannot be trained on.
        """
        encoder = PartEncoder(backend=backend, controls=control_tokens_of(backend))
        return cls(hf_tokenizer=backend, encoder=encoder, eos_ids=eos_ids, turn=assistant_turn(backend, eos_ids))

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; a model's embedding may have more rows."""
        return len(self.hf_tokenizer)

    @property
    def prefill(self) -> str:
        """What the generation prompt puts into the assistant's mouth (``<think>\\n``): completions do not have it."""
        return self.turn.prefill

    @property
    def end_of_turn(self) -> Ids:
        """What the template writes after an assistant's words, up to and with the first EOS id."""
        return self.encoder.encode_after([Part("7", "assistant")], [Part(self.turn.end, "template")])

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The control tokens, text to id; the marks of thoughts and answers are words."""
        return self.encoder.special_tokens

    def encode(self, text: str, author: Author = "other") -> Ids:
        """Token ids of a text by itself; control tokens come out where it is a template's.

        Raises:
            ModelError: a control token came out of what a person wrote.
        """
        return self.encoder.encode([Part(text, author)])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without control tokens."""
        return self.encoder.decode(ids)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens among them."""
        return self.encoder.spell(ids)

    def written(self, messages: Sequence[Message], *, tools: str = "") -> list[Part]:
        """A conversation with its generation prompt as the template writes it.

        Raises:
            ModelError: as :meth:`render_prompt`.
        """
        return written(self.hf_tokenizer, messages, tools=tools)

    def render_prompt(self, messages: Sequence[Message], *, tools: str = "") -> Ids:
        """Token ids of a conversation, ending with the generation prompt; ``tools``: as in :class:`Prompt`.

        Raises:
            ModelError: the template refuses the conversation, or drops or rewrites a message.
        """
        return self.encoder.encode(self.written(messages, tools=tools))

    def render_demonstration(self, messages: Sequence[Message], completion: str) -> tuple[Ids, Ids]:
        """Token ids of a prompt, exactly as at sampling time, and of the answer with the end of its turn.

        The answer is as the template writes it, with what it puts before the words (a blank, an empty thought). Where
        it would drop some of them, as with thoughts, they are taken as they are.

        Raises:
            ModelError: as :meth:`render_prompt`, or the completion does not begin with the template's ``prefill``.
        """
        turn, prompt = self.turn, self.written(messages)
        if not completion.startswith(turn.prefill):
            raise ModelError(
                f"the generation prompt ends with {turn.prefill!r}, so a completion must begin with it, "
                f"and this one begins with {completion[:40]!r}",
                where=str(self.hf_tokenizer.name_or_path),
                fix="add the reasoning to the demonstrations, or name a template without it in model.chat_template",
            )
        answer = self._answer(messages, completion, "".join(part.text for part in prompt))
        opening = turn.opening if answer.startswith(turn.opening) else ""
        words = Part(answer.removeprefix(opening), "assistant")
        parts = [Part(opening, "template"), words, Part(turn.end, "template")]
        return self.encoder.encode(prompt), self.encoder.encode_after(prompt, parts)

    def _answer(self, messages: Sequence[Message], completion: str, prompt: str) -> str:
        """What follows the prompt, up to the end of the turn."""
        turn, words = self.turn, completion.removeprefix(self.turn.prefill)
        whole = render(
            self.hf_tokenizer, [*messages, Message(role="assistant", content=completion)], add_generation_prompt=False
        )
        answer = whole.removeprefix(prompt).removesuffix(turn.end + turn.rest)
        if whole == prompt + answer + turn.end + turn.rest and _letters(answer) in (
            _letters(words),
            _letters(turn.opening + words),
        ):
            return answer
        has_thought = "<think>" in turn.opening and words.startswith("<think>")
        return words if has_thought else turn.opening + words


def _letters(text: str) -> str:
    """A text without its white space, which templates change."""
    return "".join(text.split())


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
            "tokenizer has no EOS token",
            where=str(folder / "generation_config.json"),
            fix="set model.extra_eos to the control token that ends a turn",
        )
    return unique


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"the file is not valid JSON: {error}", where=str(path)) from error
    return document
