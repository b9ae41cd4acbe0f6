"""What is measured of locks: one table of instruments, for every exporter.

`instruments` is the table, `recording` measures what signals tell, `gauges` what can only be asked.
An exporter, such as `contrib.prometheus`, brings it to where people look.
"""
