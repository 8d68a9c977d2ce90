"""BatchNorm that does not know how many ranks there are: by shard, or over the whole batch."""
