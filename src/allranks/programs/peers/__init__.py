"""Peers of `allranks bench`: the training of a task, written by hand or with another library.

Each is a script that anybody can read, and start as any script is started:

    allranks run --ranks 2 -- python -m allranks.programs.peers.hand JOB.json FOLDER
"""
