"""A policy that is a table of logits over prefixes: every completion, and the exact gradient of the expected reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

END = 0
Tokens = tuple[int, ...]


class TablePolicy:
    """Tokens 0 (the end) to 2, at most ``longest`` of them; with ``ends`` False no completion ends before that."""

    def __init__(self, *, longest: int = 3, ends: bool = True, seed: int = 0, spread: float = 0.7) -> None:
        self.longest, self.ends = longest, ends
        self.prefixes = list(self._prefixes(()))
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.prefixes), 3)
        self.logits = (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    def _prefixes(self, prefix: Tokens) -> Iterator[Tokens]:
        if len(prefix) == self.longest or (self.ends and END in prefix):
            return
        yield prefix
        for token in range(3):
            yield from self._prefixes((*prefix, token))

    def completions(self) -> list[Tokens]:
        """All of them: each ends with the end token, or has ``longest`` tokens."""
        grown = ((*prefix, token) for prefix in self.prefixes for token in range(3))
        return [one for one in grown if len(one) == self.longest or (self.ends and one[-1] == END)]

    def moved(self, by: float) -> TablePolicy:
        """The policy after a step in a random direction."""
        other = TablePolicy(longest=self.longest, ends=self.ends)
        noise = torch.randn(self.logits.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
        other.logits = (self.logits.detach() + by * noise).requires_grad_()
        return other

    def logprobs(self, completion: Tokens) -> torch.Tensor:
        """Return the log-probability of each token [T], with the gradient."""
        places = [self.prefixes.index(completion[:t]) for t in range(len(completion))]
        return self.logits.log_softmax(1)[places, list(completion)]

    def expected_reward(self, rewards: Mapping[Tokens, float]) -> torch.Tensor:
        """``sum of p(o) R(o)`` over every completion, with the gradient."""
        return torch.stack([self.logprobs(one).sum().exp() * reward for one, reward in rewards.items()]).sum()

    def value(self, prefix: Tokens, rewards: Mapping[Tokens, float]) -> float:
        """The expected reward of what goes on from ``prefix``."""
        if prefix in rewards:
            return rewards[prefix]
        probabilities = self.logits.detach().softmax(1)[self.prefixes.index(prefix)].tolist()
        return sum(p * self.value((*prefix, token), rewards) for token, p in enumerate(probabilities))
