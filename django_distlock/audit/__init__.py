"""Reads source and reports lock code that is wrong: `python -m django_distlock.audit PATH`.

It knows the text alone. Nothing of what it reads is imported, and neither is Django.
"""
