"""Floor of an update: FLOP of an exact computation on groups, and the machine's best matrix product."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import torch

from rlcore.hardware.precision import product


def forward_flops(shape: Mapping[str, int], prompt_lengths: torch.Tensor, lengths: torch.Tensor) -> float:
    """Return the FLOP of one forward pass of a Llama over P prompts, each once, and G completions of each.

    ``lengths`` [P, G]. Two FLOP per weight and token, the head on completion tokens only, attention on visible pairs
    only. A backward pass costs twice as much. ``shape``: the fields of a ``LlamaConfig``.
    """
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    width = heads * shape.get("head_dim", hidden // heads)  # of all queries of a token
    kv_share = shape["num_key_value_heads"] / heads
    weights = layers * (hidden * width * (2 + 2 * kv_share) + 3 * hidden * shape["intermediate_size"])
    own, prompt = lengths.double(), prompt_lengths.double()
    pairs = float(prompt.square().sum() / 2 + (prompt[:, None] * own + own.square() / 2).sum())
    backbone = 2 * weights * float(own.sum() + prompt.sum()) + 4 * width * layers * pairs
    return backbone + 2 * shape["vocab_size"] * hidden * float(own.sum())


def peak_flops(dtype: torch.dtype = torch.float32, size: int = 1024, repeats: int = 60) -> float:
    """Return the best of several matrix products, in FLOP per CPU second, so that concurrent work counts little."""
    left, right = torch.randn(2, size, size).to(dtype)  # by the kernels that training uses
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        product(left, right)
        seconds.append(time.process_time() - start)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    print(json.dumps({"gflops": peak_flops(getattr(torch, sys.argv[1])) / 1e9}))
