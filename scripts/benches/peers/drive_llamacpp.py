"""Drives llama.cpp's `llama-batched-bench`: workload B only, where nothing but the speed of a step counts.

It decodes 128 tokens after a prompt of 128 and samples nothing, which is a little less than what the
others do. It is a process for each job, with the model mapped; loading is no part of what it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from driving import Channel, Job

PREFIX = "{"


def command(program: Path, model: str, job: Job) -> list[str]:
    """What runs `job`: one sequence, one thread, answers as JSON."""
    prompt, answer = len(job.prompts[0]), job.max_tokens
    sizes = ["-c", "512", "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(answer), "-npl", "1"]
    return [str(program), "-m", model, "-t", "1", "-tb", "1", *sizes, "--output-format", "jsonl"]


def main() -> None:
    """The driver: `drive_llamacpp.py MODEL.gguf`, with the programs' folder in LLAMACPP_PROGRAMS and LLAMACPP_VERSION."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--budget", type=int, help="not used: there is one request")
    options = parser.parse_args()
    program = Path(os.environ["LLAMACPP_PROGRAMS"]) / "llama-batched-bench"
    channel = Channel()
    channel.say(ready=f"llama.cpp {os.environ['LLAMACPP_VERSION']}")
    for job in channel.jobs():
        done = subprocess.run(command(program, options.model, job), stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(PREFIX)))
        # One token came with the prompt; all that follow were decoded, at an even pace as far as it tells.
        arrivals = [(row["t_pp"], 1), (row["t_pp"] + row["t_tg"], job.max_tokens)]
        channel.answer(job, {"seconds": row["t"], "arrivals": [arrivals]})


if __name__ == "__main__":
    main()
