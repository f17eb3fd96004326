"""Thin adapters, one file a framework: each hands to `attach` or `start` what they take.

A framework is imported by its own file alone, and that file by whoever uses it.
"""
