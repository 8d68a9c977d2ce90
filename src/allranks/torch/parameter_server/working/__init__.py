"""What a worker of a parameter server does: it reads, computes, pulls and pushes."""
