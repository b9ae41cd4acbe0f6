"""Run by `manage.py`."""
