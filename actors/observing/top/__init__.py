"""`repertory top`: a live view of a company in the terminal."""
