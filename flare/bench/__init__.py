"""`flare bench`: load on any OpenAI-compatible server, and what it measured (docs/benchmarks.md)."""
