"""Each test breaks the real thing under load and holds a promise of docs/reliability.md."""
