"""Files out of the source distribution of a package, which is fetched and read but never built or run.

pip has no command that only downloads one: `pip download` runs its setup.py for metadata that it does not need
(pypa/pip issues 1884 and 7995). So pip's own finder and session are used, in a process of their own: they know the index,
proxy and certificates that pip is configured with here.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

_NOT_TO_BE_HAD = 3
_TIMEOUT_S = 240

_FETCH = f"""
import sys
from pip._internal.commands import create_command
from pip._internal.exceptions import NetworkConnectionError
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.requests import RequestException

name, version, target = sys.argv[1:]
command = create_command("download")
with command.main_context():
    options, _ = command.parse_args(["--no-binary", ":all:", "--retries", "1", "--timeout", "20"])
    try:
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        found = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
        if found is None:
            print("no index that pip is configured with has it and can be reached", file=sys.stderr)
            sys.exit({_NOT_TO_BE_HAD})
        answer = session.get(found.link.url_without_fragment)
        answer.raise_for_status()
    except (NetworkConnectionError, RequestException) as error:
        print(error, file=sys.stderr)
        sys.exit({_NOT_TO_BE_HAD})
    if not found.link.hash_name:
        sys.exit("the index gives no hash for " + found.link.filename)
    import hashlib
    if hashlib.new(found.link.hash_name, answer.content).hexdigest() != found.link.hash:
        sys.exit("the hash of " + found.link.filename + " is not that of the index")
    with open(target, "wb") as file:
        file.write(answer.content)
"""


class SdistNotToBeHadError(Exception):
    """No index that pip is configured with offers it, or none can be reached."""


def sdist_files(name: str, version: str, members: Sequence[str], folder: Path) -> list[str]:
    """The text of `members`, paths inside the sdist of `name` at `version`. They are kept in `folder`.

    Raises `SdistNotToBeHadError`; any other fault of the way to it is an error of its own.
    """
    kept = [folder / f"{name}-{version}" / member for member in members]
    if not all(file.is_file() for file in kept):
        archive = folder / f"{name}-{version}.tar.gz"
        _fetch(name, version, archive)
        with tarfile.open(archive) as tar:
            root = tar.getnames()[0].split("/")[0]
            for member, file in zip(members, kept, strict=True):
                content = tar.extractfile(f"{root}/{member}")
                assert content is not None, f"{member} is no file of {archive.name}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())
        archive.unlink()
    return [file.read_text() for file in kept]


def _fetch(name: str, version: str, target: Path) -> None:
    command = [sys.executable, "-c", _FETCH, name, version, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode == _NOT_TO_BE_HAD:
        raise SdistNotToBeHadError(f"the sdist of {name} {version} cannot be had: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
