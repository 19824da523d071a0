"""A fleet of hosts against one primary, in figures.

__main__    PROCESS the program: `python -m tools.fleet --hosts 20 --workers 50`
listeners   PROCESS what NOTIFY costs a server by the number of its listeners, with PostgreSQL alone
usage       CPU and memory of trees of processes
"""
