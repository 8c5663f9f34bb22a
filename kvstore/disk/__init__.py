"""The disk tier: segments of records in one directory, owned by one process at a time.

DIR/LOCK                               held with flock by the owner
DIR/<shelf>-<block nbytes>/            one folder per layout of blocks; those of other layouts are left alone
    segment-<number>-<epoch>           whole records, one after another; never changed once it has this name
    staging-<number>-<epoch>           being written; what is left of a dead writer is removed at the next start
"""
