"""What runs inside the workers of a vLLM engine, and alone there: it knows torch and vLLM, and nothing of rlcore.

A server has an environment of its own, without rlcore, and gets a copy of this folder as the package ``rlcore_worker``.
In the trainer's process vLLM imports it from where it lies. So its files import each other by relative names only.
"""
