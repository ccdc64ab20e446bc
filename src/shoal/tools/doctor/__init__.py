"""``shoal doctor``: checks of this machine, of the connections between hosts, and of dump files.

Each check is a function that returns a :class:`~shoal.tools.findings.Finding`, or several. ``command`` has
the table of checks. ``software``, ``machine``, ``settings`` and ``network`` check this machine, and
``self_test`` runs two ranks. ``hosts``, ``pairs`` and ``judgement`` check the connections between hosts, and
``dump_findings`` reads dump files.

Nothing here imports torch or another large library: ``probes`` does, in ``children``, so that a broken or
hanging library becomes a finding.
"""
