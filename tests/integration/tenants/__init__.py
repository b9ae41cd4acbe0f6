"""The tenants of a project with django-tenants: an app of that project alone."""
