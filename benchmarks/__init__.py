"""The commands behind bench.py: each measures one thing, prints a table, and a JSON object as the last line."""
