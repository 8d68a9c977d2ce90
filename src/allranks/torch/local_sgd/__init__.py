"""Local SGD, SlowMo, DiLoCo and others: ranks train alone and average now and then."""
