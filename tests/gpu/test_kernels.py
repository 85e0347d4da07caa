from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional
from transformers import LlamaConfig

from rlcore.models.heads import ScalarHeadModel, score_values
from rlcore.models.logprobs import chunked_logprobs, fused_loss, target_logprobs
from rlcore.models.lora import low_rank_linear
from rlcore.models.policy import score_sequences
from rlcore.sampling.decoding import decode, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.text.packing import TokenSequence
from tests.gpu import micro

NUM_TOKENS, HIDDEN, LENGTHS = 96, 64, (40, 1, 30, 25)
Rows = list[torch.Tensor]


def close(ours: Rows, theirs: Rows, exact: Rows, dtype: torch.dtype) -> None:
    """No row is further from the truth than a few times what anybody would write, and some roundings."""
    unit = torch.finfo(dtype).eps
    is_strict = ours[0].device.type == "cpu" and dtype != torch.float32
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        size = true.norm(dim=-1).clamp(min=1e-4 * float(true.norm(dim=-1).max()))
        of_mine, of_other = ((each.double().cpu() - true).norm(dim=-1) / size for each in (mine, other))
        if is_strict:
            assert bool((of_mine <= 4 * unit + 2 * of_other).all())
        else:
            assert float(of_mine.max()) <= 32 * unit + 4 * float(of_other.max())


def head_problem(dtype: torch.dtype, sharpness: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, a head that is sure of most tokens, and targets, mostly the likeliest, in numbers of ``dtype``."""
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draws).to(dtype).double()
    head = (sharpness / HIDDEN**0.5 * torch.randn(micro.VOCABULARY, HIDDEN, generator=draws)).to(dtype).double()
    targets = (hidden @ head.T).argmax(-1)
    targets[::8] = torch.randint(micro.VOCABULARY, (len(targets[::8]),), generator=draws)
    return hidden, head, targets


def plain_head(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype, t: float) -> Rows:
    """Log-probability, entropy, gradients of states and head, rows [N, ...], with the product under autocast."""
    leaves = [each.detach().requires_grad_() for each in (hidden, head)]
    half = dtype.itemsize < 4
    with torch.autocast(hidden.device.type, dtype=dtype if half else torch.bfloat16, enabled=half):
        logits = leaves[0] @ leaves[1].T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    table = (logits / t).log_softmax(-1)
    logprobs = table.gather(-1, targets[:, None])
    entropy = -(table.exp() * table).sum(-1, keepdim=True)
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(logprobs.sum() / NUM_TOKENS, leaves)]


def test_the_fused_head_and_its_loss(device: torch.device, dtype: torch.dtype) -> None:
    for sharpness, temperature in ((1.0, 1.0), (4.0, 0.6), (12.0, 1.7)):
        hidden, head, targets = head_problem(dtype, sharpness)
        exact = plain_head(hidden, head, targets, torch.float64, temperature)
        leaves = [each.float().to(device).requires_grad_() for each in (hidden, head)]
        places, seen = targets.to(device), list[Rows]()
        theirs = plain_head(*leaves, places, dtype, temperature)

        def note(_: slice, logprobs: torch.Tensor, entropy: torch.Tensor, seen: list[Rows] = seen) -> torch.Tensor:
            seen.append([logprobs.detach()[:, None], entropy[:, None]])
            return logprobs.sum() / NUM_TOKENS

        loss = fused_loss(*leaves, places, note, lengths=LENGTHS, temperature=temperature, dtype=dtype)
        gradients = torch.autograd.grad(loss, leaves)
        fused = [*map(torch.cat, zip(*seen, strict=True)), *gradients]
        found = chunked_logprobs(*leaves, places, temperature=temperature, chunk_size=33, dtype=dtype)
        gradients = torch.autograd.grad(found[0].sum() / NUM_TOKENS, leaves)
        chunked = [*(each.detach()[:, None] for each in found), *gradients]
        for ours in (fused, chunked):
            close(ours, theirs, exact, dtype)
            if device.type == "cpu":  # from the same rounded logits: as those of a float32 softmax
                torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=1e-5)
        scores = target_logprobs(*leaves, places, temperature=temperature, dtype=dtype)
        close([scores[:, None]], theirs[:1], exact[:1], dtype)


def test_an_adapted_layer(device: torch.device, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    shapes = ((200, 64), (96, 64), (8, 64), (96, 8), (200, 96))
    exact = [torch.randn(shape, generator=draws).to(dtype).double() for shape in shapes]

    def run(layer: object, tensors: Rows) -> Rows:
        inputs, weight, down, up, gradient = tensors
        leaves = [each.detach().requires_grad_() for each in (inputs, down, up)]
        output = layer(leaves[0], weight, None, leaves[1], leaves[2], 2.0)  # type: ignore[operator]
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]

    def written_out(
        x: torch.Tensor, w: torch.Tensor, _: None, a: torch.Tensor, b: torch.Tensor, s: float
    ) -> torch.Tensor:
        return functional.linear(x, w) + s * functional.linear(functional.linear(x, a), b)

    given = [each.float().to(device) for each in exact]
    given[0], given[1] = given[0].to(dtype), given[1].to(dtype)
    half = dtype.itemsize < 4
    with torch.autocast(device.type, dtype=dtype if half else torch.bfloat16, enabled=half, cache_enabled=False):
        theirs = run(written_out, given)
    ours, true = run(low_rank_linear, given), run(written_out, exact)
    close(ours, theirs, true, dtype)
    for mine, other, row in zip(ours, theirs, true, strict=True):
        worst = [float(((each.double().cpu() - row).norm(dim=-1) / row.norm(dim=-1)).max()) for each in (mine, other)]
        assert device.type != "cpu" or not half or worst[0] <= 1.1 * worst[1]


def test_scalar_heads_are_float32(device: torch.device, dtype: torch.dtype) -> None:
    backbone = micro.make(LlamaConfig)
    critic = ScalarHeadModel.with_random_head(micro.placed(backbone, device, dtype), torch.Generator().manual_seed(0))
    found = torch.cat(score_values(critic, micro.sequences(), tokens_per_microbatch=256))
    assert found.dtype == torch.float32
    head = critic.head.weight.detach().double().cpu()[0]
    exact = []
    model = backbone.double()
    model.set_attn_implementation("eager")
    for one in micro.sequences():
        tokens = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        states = model.model(tokens, use_cache=False).last_hidden_state[0, len(one.prompt_ids) - 1 : -1]
        exact.append((states @ head).detach())
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert micro.distance(found, torch.cat(exact)) < bound
    # In half precision values near each other would be equal: 8 bits hold 256 of them between 1 and 2.
    assert len(found.unique()) > 0.95 * len(found)


def test_cached_decoding_reports_what_training_computes(device: torch.device, dtype: torch.dtype) -> None:
    model = micro.make(LlamaConfig, initializer_range=0.1)
    engine = micro.placed(model, device).to(dtype)
    engine.set_attn_implementation(GROUPED_ATTENTION)
    draws = torch.Generator().manual_seed(0)
    prompts = [one.prompt_ids for one in micro.sequences(4, 2)]
    uniforms = torch.rand(len(prompts), 24, generator=draws).to(device)
    with torch.inference_mode():
        eos = torch.tensor([-1], device=device)
        decoded = decode(engine, prompts, uniforms, choose=partial(sample_tokens, temperature=0.7), eos_ids=eos)
    pairs = zip(prompts, decoded.tokens.tolist(), strict=True)
    asked = [TokenSequence(prompt_ids=prompt, completion_ids=tuple(tokens)) for prompt, tokens in pairs]
    trainer = micro.placed(model, device, dtype)
    trained = score_sequences(trainer, asked, tokens_per_microbatch=512, temperature=0.7)
    gaps = (torch.stack(trained) - decoded.logprobs.float().cpu()).abs()
    mean, most = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (0.05, 0.5), torch.float16: (0.007, 0.1)}[dtype]
    assert float(gaps.mean()) < mean
    assert float(gaps.max()) < most
