"""Years of operation: retention, backup, erasure of rows, documents for people outside of the team."""
