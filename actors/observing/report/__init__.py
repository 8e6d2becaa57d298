"""A run as one HTML file: `build.py` puts it together of the page's parts, which lie beside it."""
