"""Inside a script of `allranks check -- …`: what wraps torch's public functions and writes facts.

It runs in a foreign process, so it imports the standard library only and receives torch as an
argument: `import allranks.torch` would cost the script seconds, and load modules it did not import.
"""
