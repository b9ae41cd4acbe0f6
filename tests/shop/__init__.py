"""A small app whose table the tests write to while they hold locks."""
