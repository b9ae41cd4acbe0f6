"""Reads source and reports lock code that is wrong: `python -m django_distlock.audit PATH`.

It reads text only: it imports neither the code that it reads nor Django.
"""
