"""Orders in which requests are served, one small file each."""
