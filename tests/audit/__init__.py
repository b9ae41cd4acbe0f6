"""The audit of source: a corpus of right and wrong snippets, and the command."""
