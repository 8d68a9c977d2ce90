"""What every engine needs beside its arithmetic: how far a job is, how it goes on, what it records.

Knows no framework. The engines are joined by these pieces and by the job, never by a base class of
their trainers or strategies.
"""
