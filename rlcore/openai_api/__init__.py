"""OpenAI's protocol for the agents' gateway and ``rlcore serve``: requests, replies, errors, a guard, a server."""
