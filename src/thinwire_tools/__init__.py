"""The ``thinwire`` command and its parts: measurements, comparisons, emulated networks.

The library, `thinwire`, never imports this package.
"""
