"""What this machine's main memory can do, whichever device computes."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Main memory this process may use: the machine's, or its control group's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))
