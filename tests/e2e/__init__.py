"""The example project from outside: processes, pages, exit statuses."""
