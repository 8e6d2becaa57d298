"""From tokens to text: decode streams, stop strings, one machine per request. Pure."""
