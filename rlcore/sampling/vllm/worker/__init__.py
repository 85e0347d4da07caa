"""Code for the workers of a vLLM engine. It imports torch and vLLM, but not rlcore.

A server, without rlcore, gets a copy of this folder as the package ``rlcore_worker``; the trainer's vLLM imports the
folder itself. Files here therefore import each other by relative names only.
"""
