"""HTTP front that the agents' gateway and ``rlcore serve`` share: strict bodies, a guard, a server, OpenAI's errors."""
