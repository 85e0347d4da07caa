"""Where it runs: descriptions of machines, servers and deployments. Nothing imports this package."""
