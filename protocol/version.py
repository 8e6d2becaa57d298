"""The version of this package, for whoever writes it into a file or says it over a link."""

__version__ = "0.1.0"
