"""What `repertory simulate` is made of: where its requests come from, its table, its picture."""
