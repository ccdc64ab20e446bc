"""A program in the place of ssh, which runs the command on this machine, as if the host were another one."""

from __future__ import annotations

import sys
from pathlib import Path

#: it speaks as a login shell may; "refused" is a host that does not let anybody in,
#: and "cut" one that is lost when all has ended
_PROGRAM = """#!{python}
import os, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    words = words[2 if words[0] in ("-o", "-F") else 1:]
host, *command = words
if host == "refused":
    sys.exit("Permission denied (publickey).")
if host == "chatty":
    os.write(1, b"Welcome to chatty!\\n" * 100)
    os.write(2, b"You have mail.\\n")
if host == "noisy":
    os.write(1, b"bash: shoal: fish not found\\n")
    sys.exit(3)
if host == "old":
    program = "from shoal.launch.commands import agent; "
    program += "agent.build_version = lambda: '9.9'; agent.agent(['--stdio'])"
    os.execv(sys.executable, [sys.executable, "-c", program])
os.environ["SHOAL_HOST_ID"] = host
os.environ["SSH_CONNECTION"] = "127.0.0.1 1000 127.0.0.1 22"
os.environ.pop("SHOAL_TEST_AT_HEAD", None)
if host == "cut":
    program = "import os, shoal.launch.commands.agent as a; a.AgentServer._leave = lambda *_: os._exit(9); "
    os.execv(sys.executable, [sys.executable, "-c", program + "a.agent(['--stdio'])"])
os.execv("/bin/sh", ["sh", "-c", " ".join(command)])
"""


def fake_ssh(folder: Path) -> str:
    """Write the program; what ``SHOAL_SSH`` then is."""
    program = folder / "fake_ssh"
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)
