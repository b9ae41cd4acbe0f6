"""The shop, as Django's registry knows it."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """Connect the shop's receivers when Django is ready."""

    name = "shop"

    def ready(self) -> None:
        """Import what connects itself."""
        from shop import receivers  # noqa: F401 - registers itself, once apps are loaded
