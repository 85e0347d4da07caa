"""Code that runs only inside the workers of a vLLM engine: it knows torch and vLLM, and nothing of rlcore.

A server has its own environment, without rlcore. It gets a copy of this folder as the package ``rlcore_worker``. In the
trainer's process vLLM imports the folder itself. So the files here import each other by relative names only.
"""
