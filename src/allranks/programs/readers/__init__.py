"""Readers of common data formats: IDX, CIFAR-10, folders of images, tar shards, TFRecords.

A reader returns samples as NumPy arrays and numbers, which torch's default collate stacks.

**In two stages.** A map-style data set may have two more methods than `__len__` and `__getitem__`,
which the input pipeline runs as separate stages (`stream.StagedReader` is the base class):

    read(number) -> raw             reads the bytes of one sample from disk, and computes nothing.
    decode(raw, random) -> sample   computes the input of the model. Touches no file, unless it
                                    must read a replacement for a bad record.

`raw` is opaque to the caller. `random` is a `numpy.random.Generator` keyed by (seed, epoch, sample)
for training samples, and `None` for evaluation. It must be the only source of randomness (crop,
flip); without it nothing is random. Several threads may call both at once, in any order.
`dataset[number]` is `decode(read(number), None)`.

**Streams** (`stream.FileStream`) have `open(shard, epoch, seed, skip)` instead.

**Bad records.** A record that violates its format raises `stream.BadRecord`, which names file and
place. With `on_bad_record="skip"` it is skipped and counted: in a map-style data set the next good
sample by number replaces it, in a stream it is left out. Both depend on the files alone, so the job
is the same on every number of ranks.
"""
