"""The ``thinwire`` command and what it is made of: measurements, comparisons, emulated networks.

The library, `thinwire`, never imports this package.
"""
