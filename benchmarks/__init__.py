"""Measurements against other implementations: ``python -m benchmarks list``.

A benchmark is a function that returns a :class:`~benchmarks.registry.Report`; ``@benchmark("name")`` registers it. It
compares bits before it measures time, and reports no time for a peer whose bits differ.
"""
