"""Where the device runs, and who looks after it: a thread of this process, or a process of its own."""
