"""Ranks on other hosts: agents, the connections to them, and the hosts."""
