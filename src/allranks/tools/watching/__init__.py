"""Inside a script of `allranks check -- …`: what wraps torch's public functions and writes facts.

It is a guest in a process that is not ours, so it imports the standard library alone and is handed
torch: `import allranks.torch` would cost the script seconds, and bring what it never asked for.
"""
