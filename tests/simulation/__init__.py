"""One seed is one history of processes, threads, a network and a store, on a clock of its own.

What waits, renews, watches and releases is the package's own code; threads are greenlets, and time
passes when nobody has anything to do. `python -m tests.simulation --seed 7` repeats a history.
"""
