"""`repertory bench`: workloads with fixed seeds, what is measured of them, and how it is shown."""
