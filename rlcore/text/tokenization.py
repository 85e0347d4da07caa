"""Conversion between conversations and tokens, for one tokenizer and its chat template.

User text never becomes a control token: ``<|im_end|>`` is one token in the template's text but plain characters in user
text. A conversation is encoded as one text, so that its tokens are those that the model was trained on
(``apply_chat_template``):

    <|im_start|>user\\n | 3 + 4 = ? | <|im_end|>\\n<|im_start|>assistant\\n | 7 | <|im_end|>
    template          | text      | template                          |   completion

The last token of a completion ends the turn. It is trained like any other, even if its id is also the padding id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.text.chat_template import (
    TEMPLATE_FIX,
    AssistantTurn,
    assistant_turn,
    interleaved,
    render,
    render_parts,
    template_of,
    template_pieces,
    texts_within,
)
from rlcore.text.text_parts import Author, Ids, Part, PartEncoder, control_tokens_of
from rlcore.types import Message, Role

PROBE_ROLES: tuple[tuple[Role, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)
# Rotated through all positions: plain words, whitespace at both ends, lists, brackets.
_TEXTS = ("What is 12 + 30?", "  x = 7\n", "\n\n1. one\n2. two", "(b)")
_ANSWERS = ("Yes, it is 7.", "7")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatTokenizer:
    """Tokenizer with its chat template, EOS ids and control tokens.

    Attributes:
        eos_ids: All ids that end a completion.
        turn: Template text around an assistant's message.
    """

    hf_tokenizer: PreTrainedTokenizerBase
    encoder: PartEncoder
    eos_ids: tuple[int, ...]
    turn: AssistantTurn

    def is_same_as(self, other: ChatTokenizer) -> bool:
        """Return True if both tokenizers have the same vocabulary and EOS ids."""
        return self.eos_ids == other.eos_ids and self.hf_tokenizer.get_vocab() == other.hf_tokenizer.get_vocab()

    @classmethod
    def load(cls, folder: Path | str) -> ChatTokenizer:
        """Load a checkpoint's tokenizer, and check its template on conversations of several shapes.

        Raises:
            ModelError: There is no tokenizer, chat template or EOS id, or the template fails a check.
        """
        folder = Path(folder)
        backend = load_backend(folder)
        tokenizer = cls.of(backend, read_eos_ids(folder, backend))
        require_round_trip(tokenizer)
        require_same_tokens(tokenizer)
        return tokenizer

    @classmethod
    def of(cls, backend: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> ChatTokenizer:
        """Wrap a loaded tokenizer.

        Raises:
            ModelError: The template is unsuitable for training.
        """
        encoder = PartEncoder(backend=backend, controls=control_tokens_of(backend))
        return cls(hf_tokenizer=backend, encoder=encoder, eos_ids=eos_ids, turn=assistant_turn(backend, eos_ids))

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; embeddings may have more rows."""
        return len(self.hf_tokenizer)

    @property
    def prefill(self) -> str:
        """Start of the assistant's message in the generation prompt (``<think>\\n``), not part of completions."""
        return self.turn.prefill

    @property
    def end_of_turn(self) -> Ids:
        """Template text after an assistant's message, up to the first EOS id, inclusive."""
        return self.encoder.encode_after([Part("7", "assistant")], [Part(self.turn.end, "template")])

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens without thought and answer tags, text to id."""
        return self.encoder.special_tokens

    def encode(self, text: str, author: Author = "other") -> Ids:
        """Return the token ids of a text; only a template's text yields control tokens.

        Raises:
            ModelError: User text yields a control token.
        """
        return self.encoder.encode([Part(text, author)])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids without control tokens."""
        return self.encoder.decode(ids)

    def spell(self, ids: Sequence[int]) -> str:
        """Decode token ids, including control tokens."""
        return self.encoder.spell(ids)

    def render_parts(self, messages: Sequence[Message], *, tools: str = "") -> list[Part]:
        """Render a conversation with its generation prompt, as parts."""
        return render_parts(self.hf_tokenizer, messages, tools=tools)

    def render_prompt(self, messages: Sequence[Message], *, tools: str = "") -> Ids:
        """Return the token ids of a conversation with its generation prompt; ``tools`` as in :class:`Prompt`.

        Raises:
            ModelError: The template refuses the conversation, or drops or rewrites a message.
        """
        return self.encoder.encode(self.render_parts(messages, tools=tools))

    def render_demonstration(self, messages: Sequence[Message], completion: str) -> tuple[Ids, Ids]:
        """Return the token ids of a prompt, exactly as sampled, and of the answer with the end of its turn.

        The answer includes template text before the message (a blank, an empty thought). Text that the template would
        drop, such as thoughts, is kept.

        Raises:
            ModelError: As :meth:`render_prompt`, or the completion does not begin with ``prefill``.
        """
        turn, prompt = self.turn, self.render_parts(messages)
        if not completion.startswith(turn.prefill):
            raise ModelError(
                f"a completion must begin with {turn.prefill!r}, the end of the generation prompt, "
                f"but begins with {completion[:40]!r}",
                where=str(self.hf_tokenizer.name_or_path),
                fix="add the reasoning to the demonstrations, or name a template without it in model.chat_template",
            )
        answer = self._answer(messages, completion, "".join(part.text for part in prompt))
        opening = turn.opening if answer.startswith(turn.opening) else ""
        words = Part(answer.removeprefix(opening), "assistant")
        parts = [Part(opening, "template"), words, Part(turn.end, "template")]
        return self.encoder.encode(prompt), self.encoder.encode_after(prompt, parts)

    def _answer(self, messages: Sequence[Message], completion: str, prompt: str) -> str:
        turn, words = self.turn, completion.removeprefix(self.turn.prefill)
        whole = render(
            self.hf_tokenizer, [*messages, Message(role="assistant", content=completion)], add_generation_prompt=False
        )
        answer = whole.removeprefix(prompt).removesuffix(turn.tail)
        if whole == prompt + answer + turn.tail and _letters(answer) in (
            _letters(words),
            _letters(turn.opening + words),
        ):
            return answer
        has_thought = "<think>" in turn.opening and words.startswith("<think>")
        return words if has_thought else turn.opening + words


def _letters(text: str) -> str:
    return "".join(text.split())


def require_round_trip(tokenizer: ChatTokenizer) -> None:
    """Check that messages survive encoding and decoding, and that message text cannot end a turn.

    Raises:
        ModelError: The check failed.
    """
    question, answer = f"Is 3 + 4 = 7? {tokenizer.spell(tokenizer.end_of_turn[-1:])}", "Yes, it is."
    probe = [Message(role="user", content=question)]
    prompt_ids, completion_ids = tokenizer.render_demonstration(probe, tokenizer.prefill + answer)
    problems = []
    if question not in tokenizer.spell(prompt_ids):
        problems.append(f"the message {question!r} does not survive encoding and decoding")
    if not tokenizer.decode(completion_ids).strip().endswith(answer):
        problems.append(f"the answer {answer!r} is decoded as {tokenizer.decode(completion_ids)!r}")
    if completion_ids[-1] not in tokenizer.eos_ids:
        problems.append(f"the answer {answer!r} does not end with one of the EOS ids {list(tokenizer.eos_ids)}")
    if problems:
        raise ModelError(
            "the tokenizer or its chat template fails the round trip: " + "; ".join(problems),
            where=str(tokenizer.hf_tokenizer.name_or_path),
            fix=TEMPLATE_FIX,
        )


def require_same_tokens(tokenizer: ChatTokenizer) -> None:
    """Check that prompts and demonstrations have the tokens of ``apply_chat_template``.

    Conversations that the template refuses are skipped, as are texts that the tokenizer cannot encode; such rows are
    rejected later.

    Raises:
        ModelError: A token differs, or the tokenizer does not read the template's control tokens.
    """
    for number, roles in enumerate(PROBE_ROLES):
        try:
            parts = tokenizer.render_parts([Message(role=role, content="7") for role in roles])
        except ModelError:
            continue
        tokenizer.encoder.encode(parts)
        texts = [_TEXTS[(number + index) % len(_TEXTS)] for index in range(len(roles))]
        messages = [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]
        try:
            completion = tokenizer.prefill + _ANSWERS[number % len(_ANSWERS)]
            prompt, answer = tokenizer.render_demonstration(messages, completion)
        except ModelError:
            continue
        _compare(tokenizer, prompt, _theirs(tokenizer, messages, add_generation_prompt=True), roles)
        whole = _theirs(
            tokenizer, [*messages, Message(role="assistant", content=completion)], add_generation_prompt=False
        )
        # Templates that drop or begin a thought write an answer differently from a sampled one.
        if whole[: len(prompt)] == prompt and not tokenizer.prefill:
            length = len(prompt) + len(answer)
            ours = (*prompt, *answer)[: length if tokenizer.turn.tail.startswith(tokenizer.turn.end) else len(whole)]
            _compare(tokenizer, ours, whole[:length], (*roles, "assistant"))


def _theirs(tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[int, ...]:
    backend = tokenizer.hf_tokenizer
    ids: list[int] = backend.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        chat_template=template_of(backend),
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )
    return tuple(ids)


def _compare(tokenizer: ChatTokenizer, ours: Sequence[int], theirs: Sequence[int], roles: Sequence[Role]) -> None:
    pairs = enumerate(zip_longest(ours, theirs))
    index = next((index for index, (our, their) in pairs if our != their), None)
    if index is not None:
        our, their = (tokenizer.hf_tokenizer.convert_ids_to_tokens(ids[index : index + 1]) for ids in (ours, theirs))
        raise ModelError(
            f"tokens of a conversation with the roles {', '.join(roles)} differ from apply_chat_template: "
            f"token {index} is {our}, expected {their}",
            where=str(tokenizer.hf_tokenizer.name_or_path),
            fix=f"this tokenizer cannot be trained with this template; {TEMPLATE_FIX}",
        )


_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "spiece.model", "*.bpe.model", "vocab.*", "*.tiktoken")


def load_backend(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        ModelError: Missing or damaged tokenizer, or missing chat template.
    """
    require_vocabulary(folder)
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(
            f"the tokenizer cannot be loaded: {error}",
            where=str(folder),
            fix="the folder must hold tokenizer.json and tokenizer_config.json next to the weights",
        ) from error
    if not backend.chat_template:
        absent = [name for name in ("chat_template.jinja", "tokenizer_config.json") if not (folder / name).is_file()]
        without = f": the folder has no {' and no '.join(absent)}" if absent else ""
        raise ModelError(f"the tokenizer has no chat template{without}", where=str(folder), fix=TEMPLATE_FIX)
    return backend


def require_vocabulary(folder: Path) -> None:
    """Check that a folder has a tokenizer file; libraries would silently create an empty tokenizer.

    Raises:
        ModelError: No file of a tokenizer.
    """
    if not any(list(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ModelError(
            "the model's folder has no tokenizer.json",
            where=str(folder),
            fix="copy tokenizer.json and tokenizer_config.json from the source of the weights",
        )


def read_eos_ids(folder: Path, backend: PreTrainedTokenizerBase, *, optional: bool = False) -> tuple[int, ...]:
    """Return all EOS ids: those of the generation configuration (else of the model's), then the tokenizer's.

    Raises:
        ModelError: There is none, and ``optional`` is False.
    """
    declared = _read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(folder / "config.json").get("eos_token_id")
    ids = [*(declared if isinstance(declared, list) else [declared]), backend.eos_token_id]
    known = [number for number in ids if number is not None]
    if not all(type(number) is int and 0 <= number < len(backend) for number in known):
        raise ModelError(
            f"eos_token_id must be token ids, got {known}",
            where=str(folder / "generation_config.json"),
            fix=f"use whole numbers from 0 to {len(backend) - 1}, the tokens of the tokenizer",
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


# A token has at least one ASCII character or one byte. Tokenizers may expand characters of other scripts (3 bytes to 18
# letters), and prepend one or two blanks.
_PER_CHARACTER, _PER_BYTE, _EXTRA = 2, 12, 16
Conversation = Sequence[Message]


def encode_all(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of each answer, with the template's opening; see :meth:`PartEncoder.encode_all`.

    Raises:
        ModelError: User text yields a control token.
    """
    opening = Part(tokenizer.turn.opening, "template")
    return tokenizer.encoder.encode_all([[opening, Part(text, "assistant")] for text in texts])


def prompt_lengths(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Return the number of tokens of each conversation, with template and generation prompt.

    Raises:
        ModelError: The template refuses a conversation, or drops or rewrites a message.
    """
    divided = _divided(tokenizer, conversations)
    parts = [interleaved(pieces, own, texts) for own, (pieces, texts) in zip(conversations, divided, strict=True)]
    return [len(ids) for ids in tokenizer.encoder.encode_all(parts)]


def max_prompt_tokens(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Return an upper bound of :func:`prompt_lengths` without encoding any text.

    Raises:
        ModelError: As :func:`prompt_lengths`.
    """

    @cache
    def bound(piece: str) -> int:  # templates have few pieces; each may gain a token when merged with text
        return len(tokenizer.encode(piece, "template")) + _EXTRA

    return [
        sum(map(bound, pieces)) + sum([max_text_tokens(text) for text in texts])
        for pieces, texts in _divided(tokenizer, conversations)
    ]


def max_text_tokens(text: str) -> int:
    """Return an upper bound of the number of tokens of a text without encoding it."""
    if text.isascii():
        return _PER_CHARACTER * len(text) + _EXTRA
    return _PER_BYTE * len(text.encode("utf-8", "replace")) + _EXTRA


def _divided(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> Iterator[tuple[list[str], list[str]]]:
    backend = tokenizer.hf_tokenizer
    pieces_of = cache(lambda roles: template_pieces(backend, roles))
    for messages, whole in zip(conversations, _render_all(tokenizer, conversations), strict=True):
        pieces = pieces_of(tuple([message.role for message in messages]))
        yield pieces, texts_within(whole, messages, pieces, where=str(backend.name_or_path))


def _render_all(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[str]:
    if not conversations:
        return []
    backend = tokenizer.hf_tokenizer
    turns = [[{"role": message.role, "content": message.content} for message in one] for one in conversations]
    try:
        rendered: list[str] = backend.apply_chat_template(
            turns, chat_template=template_of(backend), tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError):  # render names the conversation
        return [render(backend, one, add_generation_prompt=True) for one in conversations]
    return rendered
