"""A run as a trace or a log tells it: its requests with their ways through the company, its steps, its copies."""
