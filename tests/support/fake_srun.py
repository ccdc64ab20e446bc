"""A program in the place of srun, which runs the tasks on this machine, as if they were on other nodes."""

from __future__ import annotations

import sys
from pathlib import Path

#: by a node's name: "deaf" starts nothing, "broken" has no such program, "twin" says that it is h1, "old" has
#: another version, and "closed" lets nobody in at all
_PROGRAM = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
nodes = options["--nodelist"].split(",")
with open("srun.pid", "w") as file:
    file.write(str(os.getpid()))
if "closed" in nodes:
    print("srun: error: Unable to create step for job 7: Job/step already completing", file=sys.stderr)
    sys.exit(1)
tasks = {{}}
for number, node in enumerate(nodes):
    environment = dict(
        os.environ, SLURMD_NODENAME="h1" if node == "twin" else node, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1",
        SLURM_PROCID=str(number), SLURM_NTASKS=str(len(nodes)), SHOAL_HOST_ID=node,
    )
    command, folder = words, options["--chdir"]
    if node == "deaf":
        command = ["sleep", "600"]
    if node == "broken":
        command = ["sh", "-c", "exit 127"]
    if node == "old":
        program = "import shoal.launch.commands.agent as a, sys; a.build_version = lambda: '9.9'; "
        program += "a.agent(sys.argv[1:])"
        command = [sys.executable, "-c", program, *words[4:]]
    tasks[node] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, cwd=folder)
highest = 0
while tasks:
    for node, task in list(tasks.items()):
        if task.poll() is not None:
            code = task.returncode if task.returncode >= 0 else 128 - task.returncode
            if code:
                print(f"srun: error: {{node}}: task {{nodes.index(node)}}: Exited with exit code {{code}}",
                      file=sys.stderr, flush=True)
            highest = max(highest, code)
            del tasks[node]
    time.sleep(0.01)
sys.exit(highest)
"""


def fake_srun(folder: Path) -> str:
    """Write the program; the directory in which it lies, for ``PATH``."""
    place = folder / "slurm-bin"
    place.mkdir()
    program = place / "srun"
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return str(place)
