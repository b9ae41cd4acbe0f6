"""The protocol of leases, fences and guards as a small model, of which every state is visited.

`python -m tests.specification` checks it, and prints what each safeguard prevents.
"""
