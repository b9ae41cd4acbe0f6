"""A small shop: products with a stock, payments to capture, a nightly report."""
