"""Adapters to other libraries, each of them opt-in."""
