"""Check before a run that our log-probabilities equal those of the model's own code, on a few tokens.

Packed rows, kernels and the head's product are compared with plain forward passes of single sequences in float32, with
the library's eager attention. Two completions of one prompt reveal state that leaks between them. A shorter prompt
reveals attention to padding. Logits that are capped, scaled or biased differ everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from rlcore.errors import ModelError
from rlcore.hardware.precision import compute_dtype, set_compute_dtype
from rlcore.models.architectures import unsupported_reason
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer

TEXT = "The train leaves at 9:15 with 42 people. Three get off, and 39 go on to the sea."
BOUND = 5e-4  # nats; measured: 2e-5 with 30 layers (SmolLM2-135M) in any weight precision, 5e-6 with 2
_CALL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError)


@torch.no_grad()
def check_model(model: PreTrainedModel, tokenizer: ChatTokenizer | None = None) -> None:
    """Compare log-probabilities of ordinary text with those of plain forward passes; the model is left as it was.

    Both are in float32, so that rounding hides no error. Without a ``tokenizer``, tokens are spread over the
    vocabulary.

    Raises:
        ModelError: The log-probabilities differ, or the model's code cannot be called.
    """
    if reason := unsupported_reason(model):
        raise ModelError(f"{type(model).__name__} {reason}", where=_name(model), fix=_OTHER_MODEL)
    sequences = _sequences(_tokens(model, tokenizer))
    try:
        with _in_float32(model):
            ours = score_sequences(model, sequences, tokens_per_microbatch=1024)
            theirs = _one_by_one(model, sequences)
    except torch.OutOfMemoryError:
        raise
    except _CALL_ERRORS as error:
        what = f"{type(model).__name__} cannot be called by the trainer: {type(error).__name__}: {error}"
        raise ModelError(what, where=_name(model), fix=_OTHER_MODEL) from error
    difference = max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
    if not difference <= BOUND:
        raise ModelError(
            f"the log-probabilities of {type(model).__name__} differ from its own logits by {difference:.3g} nats",
            where=_name(model),
            fix=_OTHER_MODEL,
        )


_OTHER_MODEL = "use a model of docs/models.md"


def _tokens(model: PreTrainedModel, tokenizer: ChatTokenizer | None) -> list[int]:
    if tokenizer is not None:
        tokens = tokenizer.encode(TEXT)
        return [tokens[index % len(tokens)] for index in range(16)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [vocabulary // 8 + index * 7919 % max(1, vocabulary * 3 // 4) for index in range(16)]


def _sequences(tokens: list[int]) -> list[TokenSequence]:
    """Return two completions of one prompt, and one of a shorter, padded prompt."""
    spans = [((0, 5), (5, 12)), ((0, 5), (9, 16)), ((3, 6), (6, 10))]
    return [
        TokenSequence(prompt_ids=tuple(tokens[slice(*prompt)]), completion_ids=tuple(tokens[slice(*completion)]))
        for prompt, completion in spans
    ]


def _one_by_one(model: PreTrainedModel, sequences: list[TokenSequence]) -> list[torch.Tensor]:
    """Return logprobs of each completion from the model's logits, float32 [T] on the CPU, eager attention."""
    results = []
    with _attention(model, "eager"):
        for sequence in sequences:
            tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]], device=model.device)
            count = len(sequence.completion_ids)
            logits = model(tokens, use_cache=False).logits[0, -count - 1 : -1].float()
            results.append(logits.log_softmax(-1).gather(-1, tokens[0, -count:, None])[:, 0].cpu())
    return results


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    if not model._can_set_attn_implementation():  # custom attention code
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    before = compute_dtype(model)
    with ExitStack() as stack:
        for part in _leaf_layers(model):
            narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
            pre = part.register_forward_pre_hook(lambda module, _, narrow=narrow: _widen(module, narrow))
            post = part.register_forward_hook(lambda *_, narrow=narrow: _restore(narrow), always_call=True)
            stack.callback(pre.remove)
            stack.callback(post.remove)
        stack.callback(set_compute_dtype, model, before)
        set_compute_dtype(model, torch.float32)
        yield


def _leaf_layers(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(True for _ in child.children()):
            yield from _leaf_layers(child)
        else:
            yield child


def _widen(module: nn.Module, narrow: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            narrow.append((tensor, tensor.data))
            tensor.data = tensor.data.float()


def _restore(narrow: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    while narrow:
        tensor, data = narrow.pop()
        tensor.data = data


def _name(model: PreTrainedModel) -> str:
    return str(model.config._name_or_path)
