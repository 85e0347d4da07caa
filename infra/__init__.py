"""Machines, servers and deployments. Nothing imports this package."""
