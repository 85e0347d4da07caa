"""A language model behind an OpenAI-compatible address: who may ask, what a request may be, what is answered."""
