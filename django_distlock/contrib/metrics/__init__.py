"""The metrics of locks: one table of instruments for all exporters.

`instruments` is the table, `recording` measures what signals report, and `gauges` reads values at
the time of a scrape. An exporter, such as `contrib.prometheus`, publishes the metrics.
"""
