"""Server of a language model at an OpenAI-compatible address: access, requests, replies."""
