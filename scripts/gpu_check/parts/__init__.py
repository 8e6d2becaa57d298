"""What is checked and measured: a file for each, whose `run(report, gpu)` has a process of its own."""
