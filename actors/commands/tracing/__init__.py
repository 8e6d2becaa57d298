"""What `repertory trace` prints."""
