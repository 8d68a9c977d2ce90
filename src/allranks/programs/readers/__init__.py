"""Readers of the data that people have: IDX, CIFAR-10, folders of images, tar shards, TFRecords.

A reader gives samples as NumPy arrays and numbers, which torch's default collate stacks.

**In two stages.** A map-style data set may offer, beside `__len__` and `__getitem__`, the two
methods from which the input pipeline makes stages of its own (`staged.Staged` is the base of ours):

    read(number) -> raw             the bytes of one sample, off the disk. Waits, computes nothing.
    decode(raw, random) -> sample   what the model is fed with. Computes, touches no file, except
                                    that a bad record is replaced by one that has to be read.

`raw` means nothing to the caller. `random` is a `numpy.random.Generator` keyed by (seed, epoch,
sample) for a sample of the training, and `None` for one that is evaluated: what is random about a
sample (crop, flip) is drawn from it and from nothing else, and without it nothing is random. Both
may be called from several threads at once, in any order. `dataset[number]` is
`decode(read(number), None)`.

**Streams** (`stream.FileStream`) have `open(shard, epoch, seed, skip)` instead, as tasks want it.

**Bad records.** A record that is not what its format says raises `bad_record.BadRecord`, which
names file and place. With `on_bad_record="skip"` it is passed over and counted: in a map-style data
set the next good sample by number stands in for it, in a stream it is left out. Both follow from
the files alone, so the job is the same on every number of ranks.
"""
