"""Code for the workers of a vLLM engine. It imports torch and vLLM, but not rlcore.

A server has its own environment, without rlcore. It gets a copy of this folder as the package ``rlcore_worker``. In the
trainer's process vLLM imports the folder itself. The files here therefore import each other only by relative names.
"""
