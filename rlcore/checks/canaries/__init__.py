"""Canaries: run-time checks that stop a run with silent errors, such as stale weights or a masked EOS."""
