"""The best that can be done: exact solvers, and the simple rules that a network should beat.

A module for each kind of problem. Each function maps the arrays of one instance, in NumPy, to
a number in the units that the environment counts in; none knows an environment or an agent.
"""
