"""The package version, which ranks compare."""

__version__ = "0.1.0"
